"""Training text as tokens: one token per byte, and a zero byte after each file.

`gather(source, folder)` copies the text into two flat files, training and held-out, which every rank maps into memory.
A hash of its path decides whether a file is held out: the parts never overlap, and adding a file moves no other.
Sample i of `Tokens` is a pure function of (seed, i). It needs no state and no layout, so a run resumes from its count
of consumed samples on any number of devices.
"""

from __future__ import annotations

import codecs
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import frozen

from megaloom.dsl.errors import UserError

STDLIB = "stdlib"
NOT_STDLIB = {"site-packages", "dist-packages"}  # folders of installed packages inside the library
VOCAB = 256
HELD_OUT = 0.05  # share of the files; of the bytes if there is only one file
PARTS = "train", "held_out"
TEXT, UNREADABLE = "text", "unreadable"  # kinds of files
INDEX_NAME = "data.json"

Ints = npt.NDArray[np.int64]


@frozen
class Tokens:
    """A flat file of `count` tokens, one byte each."""

    path: Path
    count: int

    def array(self) -> npt.NDArray[np.uint8]:
        """Return all tokens, uint8 [count], mapped into memory."""
        return np.memmap(self.path, np.uint8, "r")

    def windows(self, seq: int) -> int:
        """Return the number of samples in an epoch. Raise UserError if the text is too short for one."""
        if self.count < 2 * seq:
            raise UserError(
                f"the {self.path.stem.replace('_', '-')} text has {self.count:,} tokens, too few for --seq {seq:,}\n"
                f"give at least {2 * seq:,} bytes of text, or a smaller --seq"
            )
        return self.count // seq - 1

    def sample(self, i: int, *, seq: int, seed: int) -> Ints:
        """Return sample i, int64 [seq + 1].

        Each epoch visits every window of `seq` tokens once. Order and offset of the windows differ between epochs.
        """
        epoch, index = divmod(i, self.windows(seq))
        key = _hash(seed, epoch)
        start = key % seq + seq * permuted(index, self.windows(seq), key)
        return self.array()[start : start + seq + 1].astype(np.int64)

    def held_out_samples(self, seq: int) -> int:
        """Return the number of `held_out_sample`s."""
        return (self.count - 1) // seq

    def held_out_sample(self, i: int, *, seq: int) -> Ints:
        """Return sample i of an evaluation, int64 [seq + 1].

        All samples together predict each token once, except the first one and at most seq - 1 tokens at the end. The
        first samples come from everywhere in the text.
        """
        start = seq * permuted(i, self.held_out_samples(seq), 0)
        return self.array()[start : start + seq + 1].astype(np.int64)

    def histogram(self) -> Ints:
        """Return the number of occurrences of each token, int64 [VOCAB]."""
        return np.bincount(self.array(), minlength=VOCAB)

    def unigram_entropy(self) -> float:
        """Return the entropy of the token frequencies, in nats per token: the best loss without any context."""
        share = self.histogram() / self.count
        share = share[share > 0]
        return float(-(share * np.log(share)).sum())


@frozen
class Corpus:
    """Training and held-out tokens of one source. `digest` changes when any of its files changes."""

    source: str
    digest: str
    files: int
    train: Tokens
    held_out: Tokens


@frozen
class FileRange:
    """The bytes [start, stop) of a file."""

    path: Path
    start: int
    stop: int


def permuted(index: int, count: int, key: int) -> int:
    """Return the image of `index` under a permutation of range(count) that `key` selects.

    A Feistel network on the next power of four, repeated until the result is below count. It needs no memory and does
    not depend on library versions, which numpy's and torch's generators do not promise.
    """
    half = ((count - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for feistel_round in range(4):
            left, right = right, left ^ (_hash(key, feistel_round, right) & mask)
        index = left << half | right
        if index < count:
            return index


def gather(source: str, folder: Path) -> Corpus:
    """Copy the text of `source` into `folder`, unless an earlier call has done so, and return it as tokens.

    `source` is "stdlib" (Python's standard library), or the path of a file or folder of text. Raise UserError if it has
    no text. Processes may race: each writes a temporary file and renames it, and all write identical bytes.
    """
    try:
        root, names = _files(source)
        digest = _digest(root, names)
        counts = _gathered_counts(folder / INDEX_NAME, digest) or _gather(root, names, folder, digest)
    except OSError as error:
        path = error.filename or f"{source} or {folder}"  # a failed write names no file
        raise UserError(f"cannot read --data {source}: {error.strerror}: {path}") from None
    return Corpus(source, digest, len(names), *(Tokens(folder / f"{part}.bin", counts[part]) for part in PARTS))


def _gathered_counts(index: Path, digest: str) -> dict[str, int] | None:
    """Return the tokens of each part if an earlier call has gathered this text and its files are intact."""
    try:
        known = json.loads(index.read_text())
        tokens = {part: known["tokens"][part] for part in PARTS} if known["digest"] == digest else {}
        intact = all(index.with_name(f"{part}.bin").stat().st_size == count for part, count in tokens.items())
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    return tokens if intact and tokens else None


def _gather(root: Path, names: list[str], folder: Path, digest: str) -> dict[str, int]:
    """Write the training and the held-out part, then the index; return the tokens of each part."""
    folder.mkdir(parents=True, exist_ok=True)
    ranges = zip(PARTS, split(root, names), strict=True)
    counts = {part: _copy(chosen, folder / f"{part}.bin") for part, chosen in ranges}
    _write([json.dumps({"digest": digest, "tokens": counts}).encode()], folder / INDEX_NAME)
    return counts


def split(root: Path, names: list[str]) -> tuple[list[FileRange], list[FileRange]]:
    """Return the training and the held-out ranges, which share no byte: whole files, or two ranges of a single file."""
    if len(names) == 1:
        path = root / names[0]
        size = path.stat().st_size
        cut = size - int(size * HELD_OUT)
        return [FileRange(path, 0, cut)], [FileRange(path, cut, size)]
    by_hash = sorted(names, key=lambda name: (_unit_hash(name), name))
    held_out = {name for name in by_hash[:-1] if _unit_hash(name) < HELD_OUT} or {by_hash[0]}
    files = {name: FileRange(root / name, 0, (root / name).stat().st_size) for name in names}
    return [files[n] for n in names if n not in held_out], [files[n] for n in names if n in held_out]


def _files(source: str) -> tuple[Path, list[str]]:
    """Return the root of a source, and the sorted relative paths of its text files."""
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        names = [n for n in _walk(root) if n.endswith(".py") and not NOT_STDLIB & {*n.split("/")}]
    else:
        root = Path(source).expanduser()
        if not root.exists():
            raise UserError(f"no file or folder {source}\ngive --data a file or a folder of text, or {STDLIB!r}")
        root, names = (root, list(_walk(root))) if root.is_dir() else (root.parent, [root.name])
    kinds = {name: _kind(root / name) for name in names}
    text = sorted(name for name, kind in kinds.items() if kind == TEXT)
    if not text:
        raise UserError(f"no UTF-8 text in {root if source == STDLIB else source} ({_counted(list(kinds.values()))})")
    for name in (name for name, kind in kinds.items() if kind == UNREADABLE):
        (root / name).read_bytes()  # raises the reason: part of the text would be missing without notice
    return root, text


def _walk(root: Path) -> Iterator[str]:
    """Yield the relative paths of the files under root, except hidden files and the run folders of `train`."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if Path(folder) != root and ".lock" in files and (Path(folder) / "data" / INDEX_NAME).exists():
            folders.clear()  # a run folder, which grows during training
            continue
        for name in files:
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _kind(path: Path) -> str:
    """Return the kind of a file. Text has no zero byte among its first 8000 (Git's rule): ours separates files."""
    if not path.is_file():
        return "not regular"  # a pipe, a device, a broken link
    try:
        with path.open("rb") as file:
            head = file.read(8000)
    except OSError:
        return UNREADABLE
    if b"\0" in head:
        return "UTF-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "binary"
    return TEXT if head else "empty"


def _counted(kinds: list[str]) -> str:
    """Return the number of files of each kind, as in "3 files: 2 binary, 1 empty"."""
    total = f"{len(kinds)} file{'' if len(kinds) == 1 else 's'}"
    counts = ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).most_common())
    return f"{total}: {counts}" if counts else total


def _digest(root: Path, names: list[str]) -> str:
    """Return a digest of names, sizes and modification times: reading all text at each start would take too long."""
    stats = [(name, (s := (root / name).stat()).st_size, s.st_mtime_ns) for name in names]
    return blake2b(repr((str(root.resolve()), stats)).encode(), digest_size=16).hexdigest()


def _copy(ranges: list[FileRange], path: Path) -> int:
    """Write file ranges, each with a zero byte after it; return the number of bytes."""

    def parts() -> Iterator[bytes]:
        for each in ranges:
            with each.path.open("rb") as file:
                file.seek(each.start)
                yield file.read(each.stop - each.start) + b"\0"

    return _write(parts(), path)


def _write(parts: Iterable[bytes], path: Path) -> int:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with unfinished.open("wb") as file:
        count = sum(file.write(part) for part in parts)
    unfinished.replace(path)
    return count


def _unit_hash(name: str) -> float:
    """Return a hash of a path, uniform in [0, 1)."""
    return _hash(name) / 2**64


def _hash(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")
