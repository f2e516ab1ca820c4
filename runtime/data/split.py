"""The splits of a dataset: training, validation and test, with Megatron-LM's boundaries.

A split is consecutive sequences for models that predict the next token, and consecutive documents for others. The two
differ for datasets whose documents have several sequences, as Megatron-LM's --split-sentences makes them.
"""

from __future__ import annotations

from enum import Enum
from itertools import pairwise

from attrs import frozen

from megaloom.dsl.errors import UserError

from .indexed import IndexedDataset

SPLIT_NAMES = "training", "validation", "test"
DEFAULT_SPLIT = "969,30,1"


class SplitUnit(Enum):
    """Units that --split counts."""

    SEQUENCES = "sequences"  # as megatron-core's GPTDataset
    DOCUMENTS = "documents"  # as its MaskedWordPieceDataset, of BERT and T5


@frozen
class TokenRange:
    """The tokens [start, stop) of a dataset."""

    dataset: IndexedDataset
    start: int
    stop: int

    @property
    def count(self) -> int:
        """Return the number of tokens."""
        return self.stop - self.start


def parse_split(text: str) -> tuple[float, float, float]:
    """Return the shares of training, validation and test, which add up to 1. text: such as "969,30,1" or "95,5"."""
    try:
        given = [float(word) for word in text.split(",")]
    except ValueError:
        given = []
    shares = [*given, 0.0, 0.0][: max(3, len(given))]
    if len(shares) != 3 or not given or min(shares) < 0 or not 0 < sum(shares) < float("inf") or not shares[0]:
        raise UserError(
            f"--split {text} is not a split\ngive the shares of training, validation and test: --split {DEFAULT_SPLIT}"
        )
    return shares[0] / sum(shares), shares[1] / sum(shares), shares[2] / sum(shares)


def split_ranges(
    dataset: IndexedDataset, split: tuple[float, float, float], unit: SplitUnit = SplitUnit.SEQUENCES
) -> tuple[TokenRange, ...]:
    """Return the token ranges of training, validation and test: whole units, or ranges of a single one.

    Boundaries are rounded as by megatron-core 0.16.1, datasets/blended_megatron_dataset_builder.py:470.
    """
    by_sequence = unit is SplitUnit.SEQUENCES and not dataset.has_mask  # conversations are whole documents
    count = dataset.sequences if by_sequence else dataset.documents
    start = dataset.sequence_start if by_sequence else dataset.start
    units = count if count > 1 else dataset.tokens
    starts, before = [], 0.0
    for share in split:
        starts.append(round(before * units))
        before += share
    borders = [*starts, units]
    tokens = [start(b) if count > 1 else b for b in borders]
    return tuple(TokenRange(dataset, a, b) for a, b in pairwise(tokens))
