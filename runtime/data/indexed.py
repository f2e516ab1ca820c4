"""Megatron's indexed datasets: PREFIX.bin has the tokens of all documents, PREFIX.idx says where each begins.

The index: 9 bytes of magic, version (u64), code of the token type (u8), numbers of sequences and of document indices
(u64 each), then lengths (i32) and byte offsets (i64) of the sequences, and the first sequence of each document (i64).
Files are read and written here, not by megatron-core: processes that tokenize need no torch, and a damaged file is
named. Source: megatron-core 0.16.1, datasets/indexed_dataset.py.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import frozen

from megaloom.dsl.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES: dict[int, str] = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}  # 6 and 7 are floating-point
INDEX_SUFFIX, TOKENS, MASK = ".idx", ".bin", ".mask"
LABELS_SUFFIX, TARGET_SUFFIX = "-labels", "-target"  # of prefixes: datasets with labels, and with targets of pairs

Ints = npt.NDArray[np.int64]
DocumentTokens = Iterable[npt.NDArray[np.integer]]


@frozen
class IndexedDataset:
    """An indexed dataset on disk, mapped into memory when it is first read. Equal and pickled by its header."""

    prefix: Path
    token_type: str  # of numpy
    sequences: int
    documents: int
    tokens: int
    has_mask: bool = False  # PREFIX.mask has a byte for each token: 1 if training predicts it
    labels: IndexedDataset | None = None  # of each document: one label, or one for each token
    target: IndexedDataset | None = None  # the other texts of pairs, as many documents

    @property
    def files(self) -> tuple[IndexedDataset, ...]:
        """Return the dataset and those beside it."""
        return (self, *(each for each in (self.labels, self.target) if each is not None))

    @cached_property
    def array(self) -> npt.NDArray[np.integer]:
        """Return all tokens, [tokens]."""
        return np.memmap(path_of(self.prefix, TOKENS), self.token_type, "r") if self.tokens else np.zeros(0, np.uint8)

    @cached_property
    def mask(self) -> npt.NDArray[np.bool_] | None:
        """Return for each token whether training predicts it, [tokens]; None if it predicts all."""
        return np.memmap(path_of(self.prefix, MASK), np.bool_, "r") if self.has_mask and self.tokens else None

    @cached_property
    def offsets(self) -> Ints:
        """Return the byte offset of each document, [documents]."""
        _, offsets, firsts = _arrays(self.prefix, self.sequences, self.documents)
        if self.documents == self.sequences:
            return offsets  # in the file: a rank reads what it needs
        return np.append(offsets, self.tokens * self.token_nbytes)[firsts[:-1]]

    @cached_property
    def lengths(self) -> Ints:
        """Return the number of tokens of each document, [documents]."""
        return np.diff(np.append(self.offsets // self.token_nbytes, self.tokens))

    @property
    def sequence_lengths(self) -> Ints:
        """Return the number of tokens of each sequence, [sequences]."""
        return _arrays(self.prefix, self.sequences, self.documents)[0].astype(np.int64)

    @property
    def first_sequences(self) -> Ints:
        """Return the first sequence of each document, and the end of the last one, [documents + 1]."""
        return _arrays(self.prefix, self.sequences, self.documents)[2].astype(np.int64)

    def inner_starts(self, start: int, stop: int) -> Ints:
        """Return the tokens in (start, stop) at which a sequence begins inside its document, counted from `start`."""
        if self.sequences == self.documents:
            return np.zeros(0, np.int64)
        size = self.token_nbytes

        def inside(offsets: Ints) -> Ints:
            first, last = bisect_right(offsets, start * size), bisect_left(offsets, stop * size)
            return np.array(offsets[first:last], np.int64) // size - start

        return np.setdiff1d(inside(_arrays(self.prefix, self.sequences, self.documents)[1]), inside(self.offsets))

    def start(self, document: int) -> int:
        """Return the first token of a document; of document number `documents`, the number of tokens."""
        return self.tokens if document == self.documents else int(self.offsets[document]) // self.token_nbytes

    def sequence_start(self, sequence: int) -> int:
        """Return the first token of a sequence; of sequence number `sequences`, the number of tokens."""
        _, offsets, _ = _arrays(self.prefix, self.sequences, self.documents)
        return self.tokens if sequence == self.sequences else int(offsets[sequence]) // self.token_nbytes

    def document_at(self, token: int) -> int:
        """Return the document of a token."""
        return (
            bisect_right(self.offsets, token * self.token_nbytes) - 1
        )  # numpy would copy the offsets, which are unaligned

    def documents_of(self, start: int, stop: int) -> Ints:
        """Return the document of each of the tokens [start, stop), counted from the first one's, [stop - start]."""
        first, last = self.document_at(start), self.document_at(stop - 1)
        borders = self.offsets[first + 1 : last + 1] // self.token_nbytes - start
        return np.searchsorted(borders, np.arange(stop - start), "right").astype(np.int64)

    def document(self, index: int) -> npt.NDArray[np.integer]:
        """Return the tokens of a document."""
        return self.array[self.start(index) : self.start(index + 1)]

    @property
    def token_nbytes(self) -> int:
        """Return the bytes of a token."""
        return np.dtype(self.token_type).itemsize

    def check(self) -> None:
        """Raise UserError unless the index describes consecutive sequences that fill the file of tokens."""
        lengths, offsets, firsts = _arrays(self.prefix, self.sequences, self.documents)
        ends = np.cumsum(lengths, dtype=np.int64) * self.token_nbytes
        consecutive = self.sequences == 0 or (offsets[0] == 0 and np.array_equal(ends[:-1], offsets[1:]))
        if not consecutive or (lengths < 0).any():
            raise UserError(_damaged(self.prefix, "has sequences that overlap or leave gaps"))
        if (np.diff(firsts) < 0).any() or firsts[0] != 0 or firsts[-1] != self.sequences:
            raise UserError(_damaged(self.prefix, "has documents that are out of order"))


def path_of(prefix: Path, suffix: str) -> Path:
    """Return prefix + suffix: a prefix may have dots."""
    return Path(f"{prefix}{suffix}")


def is_indexed(prefix: Path) -> bool:
    """Return whether one of the two files of an indexed dataset exists."""
    return any(path_of(prefix, suffix).is_file() for suffix in (INDEX_SUFFIX, TOKENS))


def open_indexed(prefix: Path) -> IndexedDataset:
    """Return the dataset PREFIX.bin and PREFIX.idx. Raise UserError if a file is missing, foreign or truncated."""
    index, tokens = path_of(prefix, INDEX_SUFFIX), path_of(prefix, TOKENS)
    try:
        with index.open("rb") as file:
            header = file.read(HEADER.size)
        nbytes, index_nbytes = tokens.stat().st_size, index.stat().st_size
    except OSError as error:
        raise UserError(
            f"cannot read {error.filename}: {error.strerror}\n"
            f"an indexed dataset is {prefix.name}{TOKENS} and {prefix.name}{INDEX_SUFFIX} in one folder"
        ) from None
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise UserError(
            f"{index} is not the index of a Megatron dataset\nwrite one with: megaloom data SOURCE -o PREFIX"
        )
    _, version, code, sequences, ends = HEADER.unpack(header)
    if version != 1 or code not in TOKEN_TYPES or ends < 1:
        raise UserError(f"{index} has version {version} and token type {code}; this megaloom reads version 1, integers")
    needed = HEADER.size + 12 * sequences + 8 * ends
    if index_nbytes < needed:
        raise UserError(_damaged(prefix, f"has {index_nbytes:,} bytes; its {sequences:,} sequences need {needed:,}"))
    lengths, _, _ = _arrays(prefix, sequences, ends - 1)
    count, size = int(lengths.sum(dtype=np.int64)), np.dtype(TOKEN_TYPES[code]).itemsize
    if count * size != nbytes:
        raise UserError(
            f"{tokens} has {nbytes:,} bytes; {index.name} says {count:,} tokens of {size} bytes\n"
            "one of the two files is truncated, or they are of two datasets: write them again"
        )
    mask = path_of(prefix, MASK)
    if mask.is_file() and mask.stat().st_size != count:
        raise UserError(f"{mask} has {mask.stat().st_size:,} bytes for {count:,} tokens\nwrite the dataset again")
    return IndexedDataset(prefix, TOKEN_TYPES[code], sequences, ends - 1, count, mask.is_file())


def _arrays(prefix: Path, sequences: int, documents: int) -> tuple[npt.NDArray[np.int32], Ints, Ints]:
    """Return lengths and byte offsets of the sequences, and the first sequence of each document with the end."""
    raw = np.memmap(path_of(prefix, INDEX_SUFFIX), np.uint8, "r")
    lengths_end = HEADER.size + 4 * sequences
    offsets_end = lengths_end + 8 * sequences
    return (
        raw[HEADER.size : lengths_end].view("<i4"),
        raw[lengths_end:offsets_end].view("<i8"),
        raw[offsets_end : offsets_end + 8 * (documents + 1)].view("<i8"),
    )


def _damaged(prefix: Path, problem: str) -> str:
    return f"{path_of(prefix, INDEX_SUFFIX)} {problem}\nthe file is damaged: write the dataset again"


def smallest_token_type(vocab: int) -> str:
    """Return the type for tokens below `vocab`: one byte if it suffices, else as Megatron-LM chooses."""
    return "u1" if vocab <= 256 else "u2" if vocab < 65500 else "i4"


def write_indexed(documents: DocumentTokens, prefix: Path, token_type: str) -> IndexedDataset:
    """Write documents as PREFIX.bin and PREFIX.idx, and return the dataset.

    Each file is complete or absent, and the index is written last.
    """
    return write_index(write_tokens(documents, prefix, token_type), prefix, token_type)


def write_tokens(documents: DocumentTokens, prefix: Path, token_type: str) -> Ints:
    """Write the tokens of documents as PREFIX.bin, and return the length of each."""
    lengths = []
    tokens = path_of(prefix, TOKENS)
    unfinished = unfinished_path(tokens)
    with unfinished.open("wb") as file:
        for document in documents:
            file.write(document.astype(token_type).tobytes())
            lengths.append(len(document))
    unfinished.replace(tokens)
    return np.array(lengths, np.int64)


def write_index(lengths: Ints, prefix: Path, token_type: str, firsts: Ints | None = None) -> IndexedDataset:
    """Write PREFIX.idx for sequences of these lengths, whose tokens are in PREFIX.bin.

    firsts: the first sequence of each document, and the end of the last one; None: each sequence is a document.
    """
    if len(lengths) and lengths.max() >= 2**31:
        raise UserError(
            f"a document of {lengths.max():,} tokens is too long for {prefix}{INDEX_SUFFIX}\nsplit that document"
        )
    (code,) = (code for code, name in TOKEN_TYPES.items() if name == token_type)
    count, ends = len(lengths), np.cumsum(lengths)
    firsts = np.arange(count + 1) if firsts is None else firsts
    size = np.dtype(token_type).itemsize
    index = path_of(prefix, INDEX_SUFFIX)
    unfinished = unfinished_path(index)
    with unfinished.open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, code, count, len(firsts)))
        file.write(lengths.astype("<i4").tobytes())
        file.write(((ends - lengths) * size).astype("<i8").tobytes())
        file.write(firsts.astype("<i8").tobytes())
    unfinished.replace(index)
    return IndexedDataset(prefix, token_type, count, len(firsts) - 1, int(ends[-1]) if count else 0)


def unfinished_path(path: Path) -> Path:
    """Return the name that a file of this process has until it is complete."""
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")
