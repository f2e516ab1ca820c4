"""Made-up text: seeded random tokens, for trials of models whose data are not at hand. Losses on it say nothing."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np

from megaloom.dsl.errors import UserError

from .corpus import Corpus
from .data_split import DataSplit
from .indexed import Ints, smallest_token_type, write_indexed
from .split import SPLIT_NAMES, TokenRange
from .token_ids import TokenIds

SYNTHETIC = "synthetic"
"""The word of --data that asks for made-up text, labels and images."""
NOTE = f"data: {SYNTHETIC}: tokens, labels and images are made up, and losses on them say nothing of a model's quality"
PART_TOKENS = 2**20, 2**16  # of training and validation, if samples are not longer
SAMPLES = 8  # least number of samples in a split
DOCUMENT = 256  # tokens
SEED = 0


def is_synthetic(corpus: Corpus) -> bool:
    """Return whether the data of a run are made up."""
    return corpus.ids.name == SYNTHETIC


def synthetic_corpus(folder: Path, ids: int, length: int, split: str | None = None) -> Corpus:
    """Write random tokens below `ids` into a folder, and return them as training and validation parts.

    length: tokens that a sample reads.
    """
    if split is not None:
        raise UserError(
            f"--split {split} is for indexed datasets, and --data {SYNTHETIC} makes its parts itself\nomit it"
        )
    counts = [max(count, SAMPLES * length) for count in PART_TOKENS]
    folder.mkdir(parents=True, exist_ok=True)
    train, validation = (_made_split(folder, number, count, ids) for number, count in enumerate(counts))
    digest = blake2b(repr((SYNTHETIC, ids, counts)).encode(), digest_size=16).hexdigest()
    return Corpus(digest, train, validation, ids=TokenIds(ids, name=SYNTHETIC))


def _made_split(folder: Path, number: int, count: int, ids: int) -> DataSplit:
    """Write `count` random tokens, and return them as the split of this number."""
    name = SPLIT_NAMES[number]
    dataset = write_indexed(_documents(number, count, ids), folder / f"{SYNTHETIC}-{name}", smallest_token_type(ids))
    return DataSplit(name, (TokenRange(dataset, 0, dataset.tokens),))


def _documents(number: int, count: int, ids: int) -> Iterator[Ints]:
    """Yield documents with `count` random tokens in all. They are the same in every run."""
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence((SEED, number))))
    for start in range(0, count, DOCUMENT):
        yield random.integers(ids, size=min(DOCUMENT, count - start))
