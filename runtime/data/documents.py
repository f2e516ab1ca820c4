"""Sources of documents: text files, images, JSONL, Parquet, or a folder that the library `datasets` has saved.

`open_source` cuts a source into chunks of about CHUNK_NBYTES, the same chunks each time. So chunks can be tokenized in
any order by any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import LARGEST
from megaloom.runtime.options.groups import STDLIB

from .images import IMAGE_SUFFIXES
from .order import stable_hash
from .text_files import check_size, stat_digest, text_files, unreadable

CHUNK_NBYTES = 8 * 2**20
DEFAULT_KEY, CHAT_KEY = "text", "messages"
PARQUET_SUFFIX = ".parquet"
JSONL_SUFFIXES = {".jsonl", ".ndjson"}
SAVED_DATASET, SAVED_SPLITS = "dataset_info.json", "dataset_dict.json"  # files of the library `datasets`


class Format(Enum):
    """The format of a file or folder."""

    TEXT = "text"
    JSONL = "JSON, one object per line"
    PARQUET = "Parquet"
    DATASET = "a folder of the library datasets"
    IMAGES = "a folder of images for each class"


@frozen
class Chunk:
    """Some documents of a source: whole text files, or a range of one file.

    start, stop: bytes of JSONL, row groups of Parquet, rows of a dataset.
    """

    format: Format
    files: tuple[str, ...]
    start: int
    stop: int
    nbytes: int


@frozen
class DocumentSource:
    """A source cut into chunks. `digest` changes when any of its files changes."""

    name: str
    digest: str
    chunks: tuple[Chunk, ...]


def open_source(source: str) -> DocumentSource:
    """Return the chunks of "stdlib", a file or a folder. Raise UserError if it has no documents or is unreadable."""
    path = Path(source).expanduser()
    try:
        if source != STDLIB and path.is_dir() and ((path / SAVED_DATASET).exists() or (path / SAVED_SPLITS).exists()):
            names = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
            return DocumentSource(source, stat_digest(path, names), tuple(_dataset_chunks(path)))
        if source != STDLIB and path.is_file() and (kind := _format(path, given=True)) is not Format.TEXT:
            return DocumentSource(source, stat_digest(path.parent, [path.name]), tuple(_file_chunks(path, kind)))
        root, names = text_files(source, tables=PARQUET_SUFFIX)
        if source == STDLIB:
            names = [name for name in names if _is_utf8(root / name)]  # four tests of encodings are not
        return DocumentSource(source, stat_digest(root, names), tuple(_folder_chunks(root, names)))
    except OSError as error:
        raise unreadable(source, error) from None


def open_images(source: str) -> DocumentSource:
    """Return the chunks of a folder with one folder of images for each class, or of a source with a column of images.

    The order of the images is that of a hash of their paths, so that each part of the data has all classes.
    """
    path = Path(source).expanduser()
    if not path.is_dir() or any((path / name).exists() for name in (SAVED_DATASET, SAVED_SPLITS)):
        if path.is_dir() or path.suffix in {*JSONL_SUFFIXES, PARQUET_SUFFIX}:
            return open_source(source)
        raise UserError(f"{source} has no images\ngive a folder with a folder for each class, Parquet, or a dataset")
    try:
        names = [p.relative_to(path).as_posix() for p in path.glob("*/*") if p.suffix.lower() in IMAGE_SUFFIXES]
    except OSError as error:
        raise unreadable(source, error) from None
    names = sorted((n for n in names if not n.startswith(".")), key=lambda name: (stable_hash(name), name))
    if not names:
        raise UserError(f"{source} has no folder with images\ngive a folder with a folder of images for each class")
    chunks = tuple(_folder_chunks(path, names, Format.IMAGES))
    return DocumentSource(source, stat_digest(path, names), chunks)


def _format(path: Path, *, given: bool = False) -> Format:
    """Return the format of a file by its name. given: the user named the file itself, so that .json is JSONL."""
    if path.suffix == PARQUET_SUFFIX:
        return Format.PARQUET
    return Format.JSONL if path.suffix in JSONL_SUFFIXES or (given and path.suffix == ".json") else Format.TEXT


def _folder_chunks(root: Path, names: list[str], together: Format = Format.TEXT) -> Iterator[Chunk]:
    """Yield the chunks of files: those of the format `together` several in a chunk, other files by themselves."""
    files: list[str] = []
    nbytes = 0
    for name in names:
        path = root / name
        kind = together if together is Format.IMAGES else _format(path)
        if kind is not together:
            yield from _file_chunks(path, kind)
            continue
        if together is Format.TEXT:
            check_size(path)
        files.append(str(path))
        nbytes += path.stat().st_size
        if nbytes >= CHUNK_NBYTES:
            yield Chunk(together, tuple(files), 0, 0, nbytes)
            files, nbytes = [], 0
    if files:
        yield Chunk(together, tuple(files), 0, 0, nbytes)


def _file_chunks(path: Path, kind: Format) -> Iterator[Chunk]:
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty\ngive a file with documents")
    if kind is Format.JSONL:
        yield from _jsonl_chunks(path)
    else:
        yield from _parquet_chunks(path)


def _jsonl_chunks(path: Path) -> Iterator[Chunk]:
    """Yield byte ranges of whole lines."""
    size, start = path.stat().st_size, 0
    with path.open("rb") as file:
        while start < size:
            file.seek(min(start + CHUNK_NBYTES, size))
            read_line(file, path)
            yield Chunk(Format.JSONL, (str(path),), start, file.tell(), file.tell() - start)
            start = file.tell()


def _parquet_chunks(path: Path) -> Iterator[Chunk]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        metadata = ParquetFile(path).metadata
    except ArrowInvalid as error:
        raise UserError(f"{path} is not a Parquet file: {first_line(error)}") from None
    for group in range(metadata.num_row_groups):
        yield Chunk(Format.PARQUET, (str(path),), group, group + 1, metadata.row_group(group).total_byte_size)


def _dataset_chunks(path: Path) -> Iterator[Chunk]:
    data = load_saved(path)
    if (path / SAVED_SPLITS).exists():
        raise UserError(f"{path} has the splits {', '.join(data)}\ngive one of them: {path / next(iter(data))}")
    rows, nbytes = len(data), sum(p.stat().st_size for p in path.glob("*.arrow"))
    if not rows:
        raise UserError(f"{path} has no rows\ngive a dataset with documents")
    step = max(1, rows * CHUNK_NBYTES // max(nbytes, 1))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        yield Chunk(Format.DATASET, (str(path),), start, stop, nbytes * (stop - start) // rows)


def load_saved(path: Path) -> Any:
    """Return a dataset that the library `datasets` has saved. Raise UserError if it cannot be read."""
    from datasets import load_from_disk  # takes seconds

    try:
        return load_from_disk(str(path))
    except OSError:
        raise
    except Exception as error:  # the library raises errors of many kinds for damaged files
        raise UserError(f"cannot read the dataset {path}: {first_line(error)}") from None


def read_line(file: BinaryIO, path: Path) -> bytes:
    """Return the rest of a line. Raise UserError for one that is too long to be read whole."""
    at = file.tell()
    line = file.readline(LARGEST + 1)
    if len(line) > LARGEST:
        raise UserError(f"{line_text(path, at)} has more than {LARGEST:,} bytes\ngive one document per line")
    return line


def line_text(path: Path, offset: int) -> str:
    """Return the line of a byte as text, for a message."""
    with path.open("rb") as file:
        count = 0
        while offset > 0 and (block := file.read(min(offset, 2**20))):
            count, offset = count + block.count(b"\n"), offset - len(block)
    return f"{path}, line {count + 1},"


def class_names(chunk: Chunk, key: str) -> tuple[str, ...]:
    """Return the names that a dataset of the library `datasets` gives to the classes of a column; none elsewhere."""
    if chunk.format is not Format.DATASET:
        return ()
    column = load_saved(Path(chunk.files[0])).features.get(key)
    return tuple(getattr(getattr(column, "feature", column), "names", None) or ())


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True
