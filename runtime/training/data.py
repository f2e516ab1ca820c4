"""Text as tokens: one token a byte, a zero byte after each file.

`gather(source, folder)` copies text once into two flat files, training and held-out, which every rank maps into
memory. Whether a file is held out is decided by a hash of its path: the two never overlap, and adding a file
moves no other. Sample i of a `Tokens` is a pure function of (seed, i): it keeps no state and knows nothing of the
layout, so a run goes on from its count of consumed samples on any number of devices.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import frozen

from megaloom.dsl.errors import UserError

STDLIB = "stdlib"
NOT_STDLIB = {"site-packages", "dist-packages"}  # folders of other people's code within it
VOCAB = 256
HELD_OUT = 0.05  # of the files; of the bytes where there is only one file
PARTS = "train", "held_out"
NOTE = "data.json"

Ints = npt.NDArray[np.int64]


@frozen
class Tokens:
    """`count` tokens in a flat file of bytes."""

    path: Path
    count: int

    def array(self) -> npt.NDArray[np.uint8]:
        """All tokens, uint8 [count]: mapped, not read."""
        return np.memmap(self.path, np.uint8, "r")

    def windows(self, seq: int) -> int:
        """How many samples an epoch has; UserError if there is not even one."""
        if self.count < 2 * seq:
            raise UserError(
                f"{self.path.stem} text has {self.count:,} tokens: too few for sequences of {seq:,}\n"
                f"give at least {2 * seq:,} bytes of it, or a shorter sequence (--seq)"
            )
        return self.count // seq - 1

    def sample(self, i: int, *, seq: int, seed: int) -> Ints:
        """Sample i, int64 [seq + 1]: each epoch visits every window once, in an order and from an offset of its own."""
        epoch, at = divmod(i, self.windows(seq))
        key = _hash(seed, epoch)
        start = key % seq + seq * permuted(at, self.windows(seq), key)
        return self.array()[start : start + seq + 1].astype(np.int64)

    def histogram(self) -> Ints:
        """How often each token occurs, int64 [VOCAB]."""
        return np.bincount(self.array(), minlength=VOCAB)

    def unigram_entropy(self) -> float:
        """Nats a token: what a model that knows only how often each token occurs in this text cannot get below."""
        share = self.histogram() / self.count
        share = share[share > 0]
        return float(-(share * np.log(share)).sum())


@frozen
class Corpus:
    """Training and held-out tokens of one source; `digest` changes when any file of it does."""

    source: str
    digest: str
    files: int
    train: Tokens
    held_out: Tokens


@frozen
class Piece:
    """The bytes [start, stop) of a file."""

    path: Path
    start: int
    stop: int


def permuted(at: int, count: int, key: int) -> int:
    """The place of `at` in a permutation of range(count) chosen by `key`.

    A Feistel network on the next even power of two, walked until it lands inside: it takes no memory and is the
    same under every version of every library, which no generator of numpy or torch promises.
    """
    half = ((count - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = at >> half, at & mask
        for turn in range(4):
            left, right = right, left ^ (_hash(key, turn, right) & mask)
        at = left << half | right
        if at < count:
            return at


def gather(source: str, folder: Path) -> Corpus:
    """Copy the text of `source` into `folder`, unless it lies there already.

    `source` is "stdlib" (Python's own library), or the path of a file or a folder of text. UserError where there
    is none. Processes may race: each writes aside and renames, and all write the same.
    """
    try:
        root, names = _files(source)
        digest = _digest(root, names)
        counts = _known(folder / NOTE, digest) or _gather(root, names, folder, digest)
    except OSError as error:
        place = error.filename or f"{source}, or {folder}"  # a write that fails names no file
        raise UserError(f"data {source}: {error.strerror}: {place}") from None
    return Corpus(source, digest, len(names), *(Tokens(folder / f"{part}.bin", counts[part]) for part in PARTS))


def _known(note: Path, digest: str) -> dict[str, int] | None:
    """Tokens by part, if this very text was gathered before and is still there."""
    try:
        known = json.loads(note.read_text())
        tokens = {part: known["tokens"][part] for part in PARTS} if known["digest"] == digest else {}
        whole = all(note.with_name(f"{part}.bin").stat().st_size == count for part, count in tokens.items())
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    return tokens if whole and tokens else None


def _gather(root: Path, names: list[str], folder: Path, digest: str) -> dict[str, int]:
    """Write both parts, then the note that says they are whole; returns tokens by part."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = zip(PARTS, split(root, names), strict=True)
    counts = {part: _copy(chosen, folder / f"{part}.bin") for part, chosen in pieces}
    _write([json.dumps({"digest": digest, "tokens": counts}).encode()], folder / NOTE)
    return counts


def split(root: Path, names: list[str]) -> tuple[list[Piece], list[Piece]]:
    """Training and held-out pieces, with no byte of a file in both: whole files, or the two ends of a single one."""
    if len(names) == 1:
        path = root / names[0]
        size = path.stat().st_size
        cut = size - int(size * HELD_OUT)
        return [Piece(path, 0, cut)], [Piece(path, cut, size)]
    by_hash = sorted(names, key=lambda name: (_share(name), name))
    chosen = {name for name in by_hash[:-1] if _share(name) < HELD_OUT} or {by_hash[0]}
    whole = {name: Piece(root / name, 0, (root / name).stat().st_size) for name in names}
    return [whole[n] for n in names if n not in chosen], [whole[n] for n in names if n in chosen]


def _files(source: str) -> tuple[Path, list[str]]:
    """The root and the relative paths, sorted, of all text of a source."""
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        names = [n for n in _walk(root) if n.endswith(".py") and not NOT_STDLIB & {*n.split("/")}]
    else:
        root = Path(source).expanduser()
        if not root.exists():
            raise UserError(f"no data at {source}\ngive --data a file or a folder of text, or {STDLIB!r}")
        root, names = (root, list(_walk(root))) if root.is_dir() else (root.parent, [root.name])
    names = sorted(name for name in names if _is_text(root / name))
    if not names:
        raise UserError(f"no text in {root if source == STDLIB else source}: every file there is empty or binary")
    return root, names


def _walk(root: Path) -> Iterator[str]:
    """Relative paths of the files under root, but for hidden ones and for what runs have written."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if Path(folder) != root and ".lock" in files and (Path(folder) / "data" / NOTE).exists():
            folders.clear()  # a run's own folder, which grows while it trains
            continue
        for name in files:
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _is_text(path: Path) -> bool:
    """Git's rule: no zero byte among the first 8000. That byte is our separator. A pipe or a device is no file."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(8000)
    return bool(head) and b"\0" not in head


def _digest(root: Path, names: list[str]) -> str:
    """Of names, sizes and times, for reading all text again at each start would take too long."""
    stats = [(name, (s := (root / name).stat()).st_size, s.st_mtime_ns) for name in names]
    return blake2b(repr((str(root.resolve()), stats)).encode(), digest_size=16).hexdigest()


def _copy(pieces: list[Piece], path: Path) -> int:
    """Write pieces, each with a zero byte after it; returns how many bytes."""

    def parts() -> Iterator[bytes]:
        for piece in pieces:
            with piece.path.open("rb") as file:
                file.seek(piece.start)
                yield file.read(piece.stop - piece.start) + b"\0"

    return _write(parts(), path)


def _write(parts: Iterable[bytes], path: Path) -> int:
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with aside.open("wb") as file:
        count = sum(file.write(part) for part in parts)
    aside.replace(path)
    return count


def _share(name: str) -> float:
    """A path's place in [0, 1), as good as random."""
    return _hash(name) / 2**64


def _hash(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")
