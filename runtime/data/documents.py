"""Documents of a source: text files, JSONL, Parquet, or a folder that the library `datasets` has saved.

`chunks_of(source)` cuts a source into chunks of about CHUNK_NBYTES, the same chunks each time, and `read_chunk` yields
the documents of one. So chunks can be tokenized in any order by any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

from attrs import frozen

from megaloom.dsl.errors import UserError, did_you_mean
from megaloom.dsl.files.json_file import LARGEST, parse_json

from .text_files import STDLIB, check_size, stat_digest, text_files, unreadable

CHUNK_NBYTES = 8 * 2**20
DEFAULT_KEY, CHAT_KEY = "text", "messages"
PARQUET_SUFFIX = ".parquet"
JSONL_SUFFIXES = {".jsonl", ".ndjson"}
SAVED_DATASET, SAVED_SPLITS = "dataset_info.json", "dataset_dict.json"  # files of the library `datasets`

Document = str | list[dict[str, Any]]  # a text, or the messages of a conversation


class Format(Enum):
    """The format of a file or folder."""

    TEXT = "text"
    JSONL = "JSON, one object per line"
    PARQUET = "Parquet"
    DATASET = "a folder of the library datasets"


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


def _format(path: Path, *, given: bool = False) -> Format:
    """Return the format of a file by its name. given: the user named the file itself, so that .json is JSONL."""
    if path.suffix == PARQUET_SUFFIX:
        return Format.PARQUET
    return Format.JSONL if path.suffix in JSONL_SUFFIXES or (given and path.suffix == ".json") else Format.TEXT


def _folder_chunks(root: Path, names: list[str]) -> Iterator[Chunk]:
    """Yield the chunks of files: text files together, other files by themselves."""
    files: list[str] = []
    nbytes = 0
    for name in names:
        path = root / name
        if (kind := _format(path)) is not Format.TEXT:
            yield from _file_chunks(path, kind)
            continue
        check_size(path)
        files.append(str(path))
        nbytes += path.stat().st_size
        if nbytes >= CHUNK_NBYTES:
            yield Chunk(Format.TEXT, tuple(files), 0, 0, nbytes)
            files, nbytes = [], 0
    if files:
        yield Chunk(Format.TEXT, tuple(files), 0, 0, nbytes)


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
            _read_line(file, path)
            yield Chunk(Format.JSONL, (str(path),), start, file.tell(), file.tell() - start)
            start = file.tell()


def _parquet_chunks(path: Path) -> Iterator[Chunk]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        metadata = ParquetFile(path).metadata
    except ArrowInvalid as error:
        raise UserError(f"{path} is not a Parquet file: {_first_line(error)}") from None
    for group in range(metadata.num_row_groups):
        yield Chunk(Format.PARQUET, (str(path),), group, group + 1, metadata.row_group(group).total_byte_size)


def _dataset_chunks(path: Path) -> Iterator[Chunk]:
    data = _load_dataset(path)
    if (path / SAVED_SPLITS).exists():
        raise UserError(f"{path} has the splits {', '.join(data)}\ngive one of them: {path / next(iter(data))}")
    rows, nbytes = len(data), sum(p.stat().st_size for p in path.glob("*.arrow"))
    if not rows:
        raise UserError(f"{path} has no rows\ngive a dataset with documents")
    step = max(1, rows * CHUNK_NBYTES // max(nbytes, 1))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        yield Chunk(Format.DATASET, (str(path),), start, stop, nbytes * (stop - start) // rows)


def _load_dataset(path: Path) -> Any:
    from datasets import load_from_disk  # takes seconds

    try:
        return load_from_disk(str(path))
    except OSError:
        raise
    except Exception as error:  # the library raises errors of many kinds for damaged files
        raise UserError(f"cannot read the dataset {path}: {_first_line(error)}") from None


def read_chunk(chunk: Chunk, key: str, *, raw: bool = False) -> Iterator[Document]:
    """Yield the documents of a chunk. Raise UserError for one that has no `key` or is no text, with its place.

    raw: bytes that are no UTF-8 are kept as surrogates, for a tokenizer of bytes.
    """
    match chunk.format:
        case Format.TEXT:
            yield from (_text(Path(file), raw) for file in chunk.files)
        case Format.JSONL:
            yield from _jsonl(Path(chunk.files[0]), chunk, key)
        case Format.PARQUET:
            yield from _parquet(Path(chunk.files[0]), chunk, key)
        case Format.DATASET:
            data = _load_dataset(Path(chunk.files[0]))
            _check_column(chunk.files[0], data.column_names, key)
            column = data.select(range(chunk.start, chunk.stop))[key]
            for row, value in enumerate(column, chunk.start):
                yield _document(value, lambda row=row: f"{chunk.files[0]}, row {row},", key)  # type: ignore[misc]


def _text(path: Path, raw: bool) -> str:
    try:
        return path.read_bytes().decode(errors="surrogateescape" if raw else "strict")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8: byte {error.object[error.start]:#x} at {error.start:,}\n"
            "convert the file, or give --tokenizer bytes"
        ) from None


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def _jsonl(path: Path, chunk: Chunk, key: str) -> Iterator[Document]:
    with path.open("rb") as file:
        file.seek(chunk.start)
        while (at := file.tell()) < chunk.stop:
            line = _read_line(file, path)
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError as error:
                raise UserError(f"{_line(path, at)} is not JSON: {_first_line(error)}") from None
            if not isinstance(row, dict):
                raise UserError(f"{_line(path, at)} is not a JSON object\ngive one object per line, with a key {key!r}")
            if key not in row:
                _check_column(_line(path, at), row, key)
            yield _document(row[key], lambda at=at: _line(path, at), key)  # type: ignore[misc]


def _read_line(file: BinaryIO, path: Path) -> bytes:
    """Return the rest of a line. Raise UserError for one that is too long to be read whole."""
    at = file.tell()
    line = file.readline(LARGEST + 1)
    if len(line) > LARGEST:
        raise UserError(f"{_line(path, at)} has more than {LARGEST:,} bytes\ngive one document per line")
    return line


def _line(path: Path, offset: int) -> str:
    """Return the line of a byte as text, for a message."""
    with path.open("rb") as file:
        count = 0
        while offset > 0 and (block := file.read(min(offset, 2**20))):
            count, offset = count + block.count(b"\n"), offset - len(block)
    return f"{path}, line {count + 1},"


def _parquet(path: Path, chunk: Chunk, key: str) -> Iterator[Document]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
        _check_column(str(path), file.schema_arrow.names, key)
        column = file.read_row_groups(range(chunk.start, chunk.stop), columns=[key]).column(key)
        for i, value in enumerate(column):
            place = f"{path}, row {i} of row group {chunk.start},"
            yield _document(value.as_py(), lambda place=place: place, key)  # type: ignore[misc]
    except ArrowException as error:
        raise UserError(f"cannot read {path}: {_first_line(error)}") from None


def _check_column(where: str, names: Iterable[str], key: str) -> None:
    if key not in (known := list(names)):
        raise UserError(f"{where} has no {key!r}{did_you_mean(key, known)}give --key one of {', '.join(known)}")


def _document(value: Any, place: Callable[[], str], key: str) -> Document:
    """Return a document. place: returns the row as text, for a message."""
    if isinstance(value, str):
        _check_characters(value, place, key)
        return value
    if isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value):
        for message in value:
            for part in (x for x in message.values() if isinstance(x, str)):
                _check_characters(part, place, key)
        return value
    raise UserError(
        f"{place()} has a value of type {type(value).__name__} under {key!r}\n"
        "a document is a text, or a list of messages with role and content"
    )


def _check_characters(text: str, place: Callable[[], str], key: str) -> None:
    """Raise UserError for a text that no UTF-8 stands for: JSON can name halves of characters, such as "\\ud800"."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place()} has a surrogate without its pair under {key!r}: \\u{ord(text[error.start]):04x}, character "
            f"{error.start + 1:,}, which is no text\nremove or replace it"
        ) from None


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
