"""Text that an evaluation reads: the sources, the part and the split, by default those of the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from attrs import evolve, frozen

from megaloom.dsl.errors import UserError
from megaloom.runtime.data.corpus import Corpus, is_dataset, parse_blend
from megaloom.runtime.data.data_split import DataSplit
from megaloom.runtime.data.split import DEFAULT_SPLIT, SPLIT_NAMES, TokenRange
from megaloom.runtime.options.groups import DataOptions
from megaloom.runtime.samples.samples import SampleMaker

from .run_data import check_tokenizer, of_corpus, open_sources
from .run_folder import TOKENIZER_NAME, file_of_run

ALL = "all"
"""The part that has all documents."""


@frozen
class EvaluatedData:
    """The data of an evaluation: the words of --data, their sources, the split of each, and the shares of datasets."""

    words: tuple[str, ...]
    sources: tuple[str, ...]
    part: str
    split: str | None  # None if no source is an indexed dataset

    def split_of(self, source: str) -> str | None:
        """Return the split of a source: that of datasets; text has its own."""
        return self.split if is_dataset(source) else None


@frozen
class EvaluatedText:
    """One source of data to evaluate: its name, the split that is read, and all of its data."""

    name: str
    part: DataSplit
    corpus: Corpus


def evaluated_data(folder: Path, sources: Sequence[str], part: str | None, split: str | None) -> EvaluatedData:
    """Return the data that --data, --part and --split name, and those of the run where they are not given.

    Raise UserError for weights of sources, and for a run that does not say what its data are.
    """
    file = file_of_run(folder)
    own = file.options.data if file else DataOptions(data=())
    words = tuple(sources) or own.data
    if not words:
        raise UserError(f"--data is missing: {folder} does not say on which data it was trained\ngive --data SOURCE")
    blend = parse_blend(words)
    if sources and len(blend.names) != len(sources):
        raise UserError(
            f"--data {' '.join(sources)} has weights, but each source is evaluated by itself\n"
            f"omit them: --data {' '.join(blend.names)}"
        )
    if any(map(is_dataset, blend.names)):
        split = split or own.split or DEFAULT_SPLIT
    elif split is not None:
        raise UserError(
            f"--split {split} is for indexed datasets, and there is none in --data\n"
            "omit it: of text files, a hash of each path decides"
        )
    return EvaluatedData(words, blend.names, part or (ALL if sources else SPLIT_NAMES[1]), split)


def open_texts(
    asked: EvaluatedData, folder: Path, maker: SampleMaker, temporary: Path
) -> tuple[list[EvaluatedText], str | None]:
    """Return the texts to evaluate, and the digest of all of them as the data of a run; None if they cannot be one.

    folder: that of the run. Text is copied into `temporary`. Raise UserError for bad data, and for a part that is too
    short.
    """
    texts = []
    for i, source in enumerate(asked.sources):
        corpus = open_sources([source], asked.split_of(source), temporary / str(i), maker)
        check_tokenizer(corpus, [source], folder / TOKENIZER_NAME, str(folder))
        texts.append(_text(source, corpus, asked, maker))
    if len(asked.words) == 1:
        return texts, corpus.digest
    if not all(map(is_dataset, asked.sources)):
        return texts, None
    return texts, open_sources(asked.words, asked.split, temporary, maker).digest


def _text(source: str, corpus: Corpus, asked: EvaluatedData, maker: SampleMaker) -> EvaluatedText:
    """Return the part of a source to evaluate. Raise UserError if it is too short."""
    parts = dict(zip(SPLIT_NAMES, (corpus.train, corpus.validation, corpus.test), strict=True))
    chosen = [p for name, p in parts.items() if p and asked.part in (ALL, name)]
    ranges = _joined(r for p in chosen for r in p.ranges)
    text = evolve(corpus.train, name=asked.part, ranges=ranges, weights=None)
    if not ranges or not text.held_out_samples(of_corpus(maker, corpus).length - 1):
        split = f" by --split {asked.split}" if is_dataset(source) else ""
        raise UserError(
            f"the {asked.part} part of {source}{split} has {text.count:,} tokens, too few for sequences of "
            f"{maker.seq:,}\ngive more text, or another --part or --split"
        )
    return EvaluatedText(source, text, corpus)


def _joined(ranges: Iterable[TokenRange]) -> tuple[TokenRange, ...]:
    """Return ranges with those that follow each other joined, so that no window ends between two parts."""
    out: list[TokenRange] = []
    for r in ranges:
        if out and out[-1].dataset == r.dataset and out[-1].stop == r.start:
            out[-1] = evolve(out[-1], stop=r.stop)
        elif r.count:
            out.append(r)
    return tuple(out)
