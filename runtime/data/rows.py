"""Rows of a chunk: its documents, each with its label or the target of its pair where the data have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from megaloom.dsl.errors import UserError, did_you_mean
from megaloom.dsl.files.json_file import parse_json

from .documents import DEFAULT_KEY, Chunk, Format, first_line, line_text, load_saved, read_line

Document = str | list[dict[str, Any]]  # a text, or the messages of a conversation


@frozen
class Keys:
    """The keys of a row: of its text, source or image; of its label; and of the target of its pair."""

    text: str = DEFAULT_KEY
    label: str | None = None
    target: str | None = None

    @property
    def flags(self) -> dict[str, str]:
        """Return the option that gives each key."""
        flags = {self.text: "--source-key" if self.target else "--key"}
        flags |= {} if self.label is None else {self.label: "--label-key"}
        return flags if self.target is None else {**flags, self.target: "--target-key"}

    @property
    def has_text_only(self) -> bool:
        """Return whether rows have neither labels nor targets."""
        return self.label is None and self.target is None


TEXT_KEYS = Keys()
_DOCUMENTS = "a document is a text, or a list of messages with role and content; with labels it may be a list of words"


@frozen
class Row:
    """The values of a row under its keys, and a function that returns as text where it is, for messages."""

    text: Any
    label: Any
    target: Any
    where: Callable[[], str]


def read_chunk(chunk: Chunk, key: str, *, raw: bool = False) -> Iterator[Document]:
    """Yield the documents of a chunk. Raise UserError for one that has no `key` or is no text, with its place.

    raw: bytes that are no UTF-8 are kept as surrogates, for a tokenizer of bytes.
    """
    for row in read_rows(chunk, Keys(key), raw=raw):
        yield row.text if chunk.format is Format.TEXT else _document(row.text, row.where, key)


def texts_of_chunk(chunk: Chunk, keys: Keys) -> Iterator[str]:
    """Yield the texts of a chunk: of conversations that of each message, of words each word, of pairs both."""
    for row in read_rows(chunk, keys):
        for key, value in ((keys.text, row.text), (keys.target, row.target)):
            if key is not None:
                parts = value if isinstance(value, list) else [value]
                texts = (str(part.get("content", "")) if isinstance(part, dict) else part for part in parts)
                yield from (text_of(text, row.where, key) for text in texts)


def read_rows(chunk: Chunk, keys: Keys, *, raw: bool = False) -> Iterator[Row]:
    """Yield the rows of a chunk. Raise UserError for one that lacks a key, with its place. raw: see `read_chunk`."""
    match chunk.format:
        case Format.TEXT:
            if not keys.has_text_only:
                flag = next(flag for key, flag in keys.flags.items() if key != keys.text)
                raise UserError(
                    f"{chunk.files[0]} is a text file, which has no keys for {flag}\n"
                    "give JSONL, Parquet, or a folder of the library datasets"
                )
            yield from (Row(_text(Path(file), raw), None, None, lambda: "") for file in chunk.files)
        case Format.IMAGES:
            for file in chunk.files:
                yield Row(Path(file), Path(file).parent.name, None, lambda file=file: file)  # type: ignore[misc]
        case Format.JSONL:
            yield from _jsonl(Path(chunk.files[0]), chunk, keys)
        case Format.PARQUET:
            yield from _parquet(Path(chunk.files[0]), chunk, keys)
        case Format.DATASET:
            data, name = load_saved(Path(chunk.files[0])), chunk.files[0]
            _check_columns(name, data.column_names, keys)
            chosen = data.select(range(chunk.start, chunk.stop)).select_columns(list(keys.flags))
            for i, row in enumerate(chosen, chunk.start):
                yield _row(row, keys, lambda i=i: f"{name}, row {i},")  # type: ignore[misc]


def _row(fields: Mapping[str, Any], keys: Keys, place: Callable[[], str]) -> Row:
    label = None if keys.label is None else fields[keys.label]
    return Row(fields[keys.text], label, None if keys.target is None else fields[keys.target], place)


def _text(path: Path, raw: bool) -> str:
    try:
        return path.read_bytes().decode(errors="surrogateescape" if raw else "strict")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8: byte {error.object[error.start]:#x} at {error.start:,}\n"
            "convert the file, or give --tokenizer bytes"
        ) from None


def _jsonl(path: Path, chunk: Chunk, keys: Keys) -> Iterator[Row]:
    with path.open("rb") as file:
        file.seek(chunk.start)
        while (at := file.tell()) < chunk.stop:
            line = read_line(file, path)
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError as error:
                raise UserError(f"{line_text(path, at)} is not JSON: {first_line(error)}") from None
            if not isinstance(row, dict):
                raise UserError(
                    f"{line_text(path, at)} is not a JSON object\ngive one object per line, with a key {keys.text!r}"
                )
            if not keys.flags.keys() <= row.keys():
                _check_columns(line_text(path, at), row, keys)
            yield _row(row, keys, lambda at=at: line_text(path, at))  # type: ignore[misc]


def _parquet(path: Path, chunk: Chunk, keys: Keys) -> Iterator[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
        _check_columns(str(path), file.schema_arrow.names, keys)
        table = file.read_row_groups(range(chunk.start, chunk.stop), columns=list(keys.flags))
        columns = {key: table.column(key) for key in keys.flags}
        for i in range(table.num_rows):
            place = f"{path}, row {i} of row group {chunk.start},"
            fields = {key: column[i].as_py() for key, column in columns.items()}
            yield _row(fields, keys, lambda place=place: place)  # type: ignore[misc]
    except ArrowException as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from None


def _check_columns(where: str, names: Iterable[str], keys: Keys) -> None:
    known = list(names)
    for key, flag in keys.flags.items():
        if key not in known:
            raise UserError(f"{where} has no {key!r}{did_you_mean(key, known)}give {flag} one of {', '.join(known)}")


def _document(value: Any, place: Callable[[], str], key: str) -> Document:
    """Return a document. place: returns the row as text, for a message."""
    if isinstance(value, str):
        return text_of(value, place, key)
    if isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value):
        for message in value:
            for part in (x for x in message.values() if isinstance(x, str)):
                text_of(part, place, key)
        return value
    raise UserError(f"{place()} has a value of type {type(value).__name__} under {key!r}\n{_DOCUMENTS}")


def text_of(text: Any, place: Callable[[], str], key: str) -> str:
    """Return a text. Raise UserError for another value, and for a text that no UTF-8 stands for.

    JSON can name halves of characters, such as "\\ud800".
    """
    if not isinstance(text, str):
        raise UserError(f"{place()} has a value of type {type(text).__name__} under {key!r}\n{_DOCUMENTS}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place()} has a surrogate without its pair under {key!r}: \\u{ord(text[error.start]):04x}, character "
            f"{error.start + 1:,}, which is no text\nremove or replace it"
        ) from None
    return text
