"""Text files as bytes: one token per byte, and a zero byte after each file.

`gather(source, folder)` copies the text into two indexed datasets, training and held-out, which every rank maps into
memory. A hash of its path decides whether a file is held out: the parts never overlap, and adding a file moves no
other.
"""

from __future__ import annotations

import codecs
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import read_json
from megaloom.planner.contract.devices import GiB
from megaloom.runtime.megatron.host import host_memory
from megaloom.runtime.options.groups import STDLIB

from .indexed import IndexedDataset, open_indexed, unfinished_path, write_indexed
from .order import stable_hash

NOT_STDLIB = {"site-packages", "dist-packages"}  # folders of installed packages inside the library
HELD_OUT = 0.05  # share of the files; of the bytes if there is only one file
GATHERED = "train", "held_out"  # names of the two datasets
TEXT, UNREADABLE, HIDDEN = "text", "unreadable", "hidden"  # kinds of files
DATA_NAME = "data.json"
MEMORY_OF_ONE = 4  # one text file may take the host's memory divided by this: it is there as bytes, text and tokens


@frozen
class GatheredText:
    """Text that was copied into a run folder. `digest` changes when any of its files changes."""

    digest: str
    files: int
    train: IndexedDataset
    held_out: IndexedDataset


@frozen
class FileRange:
    """The bytes [start, stop) of a file."""

    path: Path
    start: int
    stop: int


def gather(source: str, folder: Path) -> GatheredText:
    """Copy the text of `source` into `folder`, unless an earlier call has done so, and return it as tokens.

    `source` is "stdlib" (Python's standard library), or the path of a file or folder of text. Raise UserError if it has
    no text. Processes may race: each writes a temporary file and renames it, and all write identical bytes.
    """
    try:
        root, names = text_files(source)
        for name in names:
            check_size(root / name)
        digest = stat_digest(root, names)
        train, held_out = _gathered(folder, digest) or _copy(root, names, folder, digest)
    except OSError as error:
        if error.filename is None or Path(error.filename).is_relative_to(folder):  # a failed write names no file
            raise UserError(f"cannot copy --data {source} into {folder}: {error.strerror}") from None
        raise unreadable(source, error) from None
    return GatheredText(digest, len(names), train, held_out)


def existing(source: str) -> Path:
    """Return the path of a file or folder of text. Raise UserError if there is none."""
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(f"no file or folder {source}\ngive a file or a folder of text, or {STDLIB!r}")
    return path


def unreadable(source: str, error: OSError) -> UserError:
    """Return the error for a file or folder of a source that cannot be read."""
    return UserError(f"cannot read {source}: {error.strerror}: {error.filename or source}")


def _gathered(folder: Path, digest: str) -> tuple[IndexedDataset, ...] | None:
    """Return the datasets if an earlier call has copied this text and its files are intact."""
    try:
        known = read_json(folder / DATA_NAME)
        if known["digest"] == digest:
            datasets = tuple(open_indexed(folder / name) for name in GATHERED)
            return datasets if [d.tokens for d in datasets] == [known["tokens"][name] for name in GATHERED] else None
    except (FileNotFoundError, ValueError, TypeError, KeyError):  # UserError is a ValueError
        pass
    return None


def _copy(root: Path, names: list[str], folder: Path, digest: str) -> tuple[IndexedDataset, ...]:
    """Write the training and the held-out dataset, then data.json; return the datasets."""
    folder.mkdir(parents=True, exist_ok=True)
    ranges = zip(GATHERED, split_files(root, names), strict=True)
    datasets = tuple(write_indexed(_documents(chosen), folder / name, "u1") for name, chosen in ranges)
    tokens = {name: dataset.tokens for name, dataset in zip(GATHERED, datasets, strict=True)}
    unfinished = unfinished_path(folder / DATA_NAME)
    unfinished.write_text(json.dumps({"digest": digest, "tokens": tokens}))
    unfinished.replace(folder / DATA_NAME)
    return datasets


def _documents(ranges: list[FileRange]) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the bytes of each range and a zero byte."""
    for each in ranges:
        with each.path.open("rb") as file:
            file.seek(each.start)
            yield np.frombuffer(file.read(each.stop - each.start) + b"\0", np.uint8)


def split_files(root: Path, names: list[str]) -> tuple[list[FileRange], list[FileRange]]:
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


def text_files(source: str, tables: str | None = None) -> tuple[Path, list[str]]:
    """Return the root of a source, and the sorted relative paths of its text files.

    tables: a suffix of files that count as text whatever is in them. Hidden files and run folders are left out. Raise
    OSError for a file or folder that cannot be read: part of the text would be missing without notice.
    """
    hidden: list[str] = []
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        names = [n for n in _walk(root, hidden) if n.endswith(".py") and not NOT_STDLIB & {*n.split("/")}]
    else:
        root = existing(source)
        root, names = (root, list(_walk(root, hidden))) if root.is_dir() else (root.parent, [root.name])
    kinds = {name: TEXT if tables and name.endswith(tables) else _kind(root / name) for name in names}
    text = sorted(name for name, kind in kinds.items() if kind == TEXT)
    if not text:
        counted = _counted([*kinds.values(), *(HIDDEN for _ in hidden)])
        raise UserError(f"no UTF-8 text in {root if source == STDLIB else source} ({counted})")
    for name in (name for name, kind in kinds.items() if kind == UNREADABLE):
        try:
            (root / name).read_bytes()
        except OSError as error:  # the error of a read names no file
            raise OSError(error.errno, error.strerror, str(root / name)) from None
    return root, text


def check_size(path: Path) -> None:
    """Raise UserError for a text file that is too large to be read whole: it is one document."""
    size, most = path.stat().st_size, host_memory() // MEMORY_OF_ONE
    if size > most:
        raise UserError(
            f"{path} has {size / GiB:.1f} GiB; a text file is one document and is read whole, so that it may have "
            f"{most / GiB:.1f} GiB at most on this host\ngive several files, or JSONL with one document a line"
        )


def _walk(root: Path, hidden: list[str]) -> Iterator[str]:
    """Yield the relative paths of the files under root, except the run folders of `train`. Add hidden ones to a list.

    Raise OSError for a folder that cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(root, onerror=refuse):
        hidden += [name for name in (*folders, *files) if name.startswith(".")]
        folders[:] = [name for name in folders if not name.startswith(".")]
        if Path(folder) != root and ".lock" in files and (Path(folder) / "data" / DATA_NAME).exists():
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


def stat_digest(root: Path, names: list[str]) -> str:
    """Return a digest of names, sizes and modification times: reading all text at each start would take too long."""
    stats = [(name, (s := (root / name).stat()).st_size, s.st_mtime_ns) for name in names]
    return blake2b(repr((str(root.resolve()), stats)).encode(), digest_size=16).hexdigest()


def _unit_hash(name: str) -> float:
    """Return a hash of a path, uniform in [0, 1)."""
    return stable_hash(name) / 2**64
