"""The data of a run: training, validation and test parts of text files or of indexed datasets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

from attrs import evolve, frozen

from megaloom.dsl.errors import UserError
from megaloom.runtime.options.groups import STDLIB

from .data_split import DataSplit
from .description import RUNNING_TEXT, TOKENIZER_SUFFIX, DataKind, Description, read_description
from .indexed import (
    INDEX_SUFFIX,
    LABELS_SUFFIX,
    TARGET_SUFFIX,
    TOKENS,
    IndexedDataset,
    is_indexed,
    open_indexed,
    path_of,
)
from .integrity import check_described
from .split import DEFAULT_SPLIT, SPLIT_NAMES, SplitUnit, TokenRange, parse_split, split_ranges
from .text_files import gather
from .token_ids import BYTE_IDS, TokenIds

SCANNED_TOKENS = 2**28
"""Most tokens of a dataset without a description that are read to find the largest id."""


@frozen
class Corpus:
    """The data of a run. `digest` changes when any of its files changes."""

    digest: str
    train: DataSplit
    validation: DataSplit | None
    test: DataSplit | None = None
    ids: TokenIds = BYTE_IDS
    tokenizer: Path | None = None  # folder; None for bytes, and for a dataset that Megatron-LM has written
    kind: DataKind = RUNNING_TEXT

    @property
    def counts_some(self) -> bool:
        """Return whether training predicts only some of the tokens, such as the assistant's."""
        return any(r.dataset.has_mask for r in self.train.ranges)


@frozen
class Blend:
    """The sources of the option --data, and their weights if it gives any."""

    names: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(words: Sequence[str]) -> Blend:
    """Return the sources and weights of --data: `A B`, or `0.3 A 0.7 B`. Raise UserError for a mixture of both."""
    numbers = [_number(word) for word in words]
    if not words:
        raise UserError("--data names nothing\ngive a file or folder of text, or prefixes of indexed datasets")
    if all(number is None for number in numbers):
        return Blend(tuple(words), None)
    weights = [number for number in numbers[::2] if number is not None]
    if len(words) % 2 or len(weights) * 2 != len(words) or any(number is not None for number in numbers[1::2]):
        raise UserError(
            f"--data {' '.join(words)} is not a blend\ngive a weight before each dataset (--data 0.3 A 0.7 B), or none"
        )
    if not all(0 < weight < float("inf") for weight in weights):
        raise UserError(f"--data {' '.join(words)} has a weight that is not above 0\nleave that dataset out")
    return Blend(tuple(words[1::2]), tuple(weights) if len(weights) > 1 else None)


def _number(word: str) -> float | None:
    """Return the number that a word is, unless a file or dataset has that name."""
    try:
        return None if Path(word).exists() or is_indexed(Path(word)) else float(word)
    except ValueError:
        return None


def is_dataset(word: str) -> bool:
    """Return whether a word of --data names an indexed dataset, and not text."""
    return is_indexed(_prefix(word))


def has_sentences(word: str) -> bool:
    """Return whether a word of --data names a dataset of running text whose documents have several sequences.

    Raise UserError for a damaged index.
    """
    prefix = _prefix(word)
    dataset = open_indexed(prefix) if is_indexed(prefix) else None
    return dataset is not None and dataset.sequences > dataset.documents and not dataset.has_mask


def described_ids(word: str) -> TokenIds | None:
    """Return the ids of the tokenizer of a dataset; None without a description, such as for one of Megatron-LM."""
    described = read_description(_prefix(word))
    return described.ids if described else None


def kind_of(words: Sequence[str]) -> DataKind:
    """Return what the first dataset of --data has beside running text. Raise UserError for a damaged description."""
    prefixes = [_prefix(name) for name in parse_blend(words).names]
    described = read_description(prefixes[0]) if is_indexed(prefixes[0]) else None
    return described.kind if described else RUNNING_TEXT


def open_corpus(
    words: Sequence[str],
    split: str | None,
    folder: Path,
    check: Callable[[TokenIds], None] = lambda ids: None,
    unit: SplitUnit = SplitUnit.SEQUENCES,
) -> Corpus:
    """Return the data of --data and --split, whose shares are of this unit. Raise UserError for bad data.

    Text is copied into `folder`, after `check` has been called with its ids.
    """
    corpus = indexed_corpus(words, split, check, unit)
    return _text_corpus(parse_blend(words).names[0], split, folder) if corpus is None else corpus


def indexed_corpus(
    words: Sequence[str],
    split: str | None,
    check: Callable[[TokenIds], None] = lambda ids: None,
    unit: SplitUnit = SplitUnit.SEQUENCES,
) -> Corpus | None:
    """Return the data of --data if they are indexed datasets; None for text. Raise UserError for bad data.

    Nothing is written. `check` is called with the ids of the data.
    """
    blend = parse_blend(words)
    prefixes = [_prefix(name) for name in blend.names]
    if all(is_indexed(prefix) for prefix in prefixes):
        corpus = _indexed_corpus(prefixes, blend.weights, split or DEFAULT_SPLIT, unit)
        check(corpus.ids)
        return corpus
    if len(prefixes) == 1:
        check(BYTE_IDS)
        return None
    name = next(n for n, prefix in zip(blend.names, prefixes, strict=True) if not is_indexed(prefix))
    if name != STDLIB and not Path(name).expanduser().exists():
        raise UserError(f"no file, folder or indexed dataset {name}\ngive --data prefixes of indexed datasets")
    raise UserError(
        f"--data {name} is not an indexed dataset; several sources must all be indexed\n"
        f"tokenize it: megaloom data {name} -o PREFIX --tokenizer FILE_OR_FOLDER"
    )


def _prefix(name: str) -> Path:
    """Return the prefix that a name means: with or without .bin or .idx."""
    path = Path(name).expanduser()
    return path.with_suffix("") if path.suffix in (INDEX_SUFFIX, TOKENS) and path.is_file() else path


def _text_corpus(source: str, split: str | None, folder: Path) -> Corpus:
    if split is not None:
        raise UserError(
            f"--split {split} is for indexed datasets; of text files, a hash of each path decides\n"
            f"omit --split, or tokenize the text: megaloom data {source} -o PREFIX --tokenizer bytes"
        )
    text = gather(source, folder)
    train, held_out = (TokenRange(dataset, 0, dataset.tokens) for dataset in (text.train, text.held_out))
    return Corpus(text.digest, DataSplit(SPLIT_NAMES[0], (train,)), DataSplit(SPLIT_NAMES[1], (held_out,)))


def _indexed_corpus(prefixes: list[Path], weights: tuple[float, ...] | None, split: str, unit: SplitUnit) -> Corpus:
    shares, descriptions = parse_split(split), [read_description(prefix) for prefix in prefixes]
    datasets = [_checked(prefix, about) for prefix, about in zip(prefixes, descriptions, strict=True)]
    ids, kind = _common_ids(datasets, descriptions), _common_kind(prefixes, descriptions)
    if len({dataset.has_mask for dataset in datasets}) > 1:
        raise UserError("--data blends conversations with text\ngive datasets of one kind")
    whole, padding = datasets[0].has_mask, ids.pad or 0
    train, *others = zip(*(split_ranges(dataset, shares, unit) for dataset in datasets), strict=True)
    held_out = [tuple(r for r in ranges if r.count) for ranges in others]
    validation, test = (
        DataSplit(name, ranges, None, whole, padding) if ranges else None
        for name, ranges in zip(SPLIT_NAMES[1:], held_out, strict=True)
    )
    digests = [_digest(d, x) for d, x in zip(datasets, descriptions, strict=True)]
    folder = path_of(prefixes[0], TOKENIZER_SUFFIX)
    several = any(d.sequences != d.documents and not d.has_mask for d in datasets)
    by_sequence = unit is SplitUnit.SEQUENCES and several  # earlier versions split by documents
    contents = (digests, weights, shares, *((unit.value,) if by_sequence else ()))
    return Corpus(
        blake2b(repr(contents).encode(), digest_size=16).hexdigest(),
        DataSplit(SPLIT_NAMES[0], train, weights, whole, padding),
        validation,
        test,
        ids,
        folder if folder.is_dir() else None,
        kind,
    )


def _checked(prefix: Path, about: Description | None) -> IndexedDataset:
    """Return a dataset whose files are whole and have tokens, with the labels and targets that it is described with."""
    dataset = open_indexed(prefix)
    dataset.check()
    if not dataset.tokens:
        raise UserError(f"{path_of(prefix, TOKENS)} is empty\ngive a dataset with tokens")
    if about is None:
        return dataset
    labels, target = (
        open_indexed(path_of(prefix, suffix)) if there else None
        for suffix, there in ((LABELS_SUFFIX, about.labels is not None), (TARGET_SUFFIX, about.pairs))
    )
    dataset = evolve(dataset, labels=labels, target=target)
    for each in dataset.files[1:]:
        each.check()
        if each.documents != dataset.documents:
            raise UserError(
                f"{each.prefix} has {each.documents:,} documents, and {prefix} has {dataset.documents:,}\n"
                "the files are of two datasets: copy all files of the dataset again, or write it again"
            )
    return dataset


def _common_kind(prefixes: list[Path], descriptions: list[Description | None]) -> DataKind:
    """Return what all datasets have beside running text. Raise UserError if they differ."""
    kinds = [RUNNING_TEXT if about is None else about.kind for about in descriptions]
    for prefix, kind in zip(prefixes, kinds, strict=True):
        if kind != kinds[0]:
            same = kind.words == kinds[0].words
            what = "have different classes" if same else f"are {kind.words} and {kinds[0].words}"
            raise UserError(f"{prefix} and {prefixes[0]} {what}\ngive datasets of one kind, with the same classes")
    return kinds[0]


def _digest(dataset: IndexedDataset, description: Description | None) -> str:
    """Return the digest of a dataset: of what it was made of, or of its files' sizes and times."""
    stats = [path_of(dataset.prefix, suffix).stat() for suffix in (TOKENS, INDEX_SUFFIX)]
    return description.digest if description else repr([(s.st_size, s.st_mtime_ns) for s in stats])


def _common_ids(datasets: list[IndexedDataset], descriptions: list[Description | None]) -> TokenIds:
    """Return the ids of all datasets. Raise UserError if they were made with different tokenizers."""
    described = [(d, x) for d, x in zip(datasets, descriptions, strict=True) if x is not None]
    for dataset, description in described:
        check_described(dataset, description)
        if description.tokenizer != described[0][1].tokenizer:
            raise UserError(
                f"{dataset.prefix} and {described[0][0].prefix} were made with different tokenizers\n"
                "give datasets of one tokenizer"
            )
    if described:
        return described[0][1].ids
    highest = max(int(dataset.array[:SCANNED_TOKENS].max()) for dataset in datasets)
    return TokenIds(highest + 1, name=str(datasets[0].prefix))
