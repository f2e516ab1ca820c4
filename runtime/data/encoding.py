"""Rows as tokens: of a text, a conversation or words, with labels; of the target of a pair; and images as pixels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from megaloom.dsl.errors import UserError

from .chat_template import ChatTemplate, load_chat_template
from .documents import Chunk
from .images import ImageSize, pixels_of
from .labels import IGNORED
from .rows import Document, Keys, Row, read_chunk, read_rows, text_of
from .sentences import sentences_of
from .token_ids import BYTE_IDS
from .tokenizer import load_tokenizer
from .tokenizer_kinds import TextTokenizer, Tokens

BATCH_CHARACTERS = 2**20
"""Characters that a tokenizer encodes in one call."""


@frozen
class ChunkTask:
    """One chunk to tokenize, and the options that decide its tokens."""

    chunk: Chunk
    out: Path  # prefix of the part
    tokenizer: str
    keys: Keys
    append_eos: bool
    add_bos: bool = False
    image: ImageSize | None = None  # of the pixels, if the documents are images
    sentences: str | None = None  # the language by which texts are split into sentences


@frozen(eq=False)
class Encoded:
    """The tokens of a document, and what the data have of it beside them."""

    tokens: Tokens
    counted: npt.NDArray[np.bool_] | None = None  # of a conversation: whether training predicts each token
    target: Tokens | None = None  # of a pair
    label: Any = None  # of the document, or a list of those of its tokens
    row: Row | None = None
    sentences: tuple[int, ...] = ()  # the tokens of each sentence; none if the text is not split

    @property
    def is_empty(self) -> bool:
        """Return whether a text of the document has no token."""
        return not len(self.tokens) or (self.target is not None and not len(self.target))


@cache
def cached_tokenizer(source: str) -> TextTokenizer:
    """Return a tokenizer; a process loads it once."""
    return load_tokenizer(source)


@cache
def _cached_chat_template(source: str) -> ChatTemplate:
    """Return the chat template of a tokenizer; a process loads it once."""
    return load_chat_template(source)


def forget_tokenizers() -> None:
    """Drop the tokenizers that this process has loaded: their files may have changed since another dataset was made."""
    cached_tokenizer.cache_clear()
    _cached_chat_template.cache_clear()


def encoded(task: ChunkTask) -> Iterator[Encoded]:
    """Yield the documents of a chunk. Those without tokens have neither label nor target, and are left out."""
    if task.image is not None:
        for row in read_rows(task.chunk, task.keys):
            yield Encoded(pixels_of(row.text, task.image, row.where), label=row.label, row=row)
    elif task.keys.has_text_only:
        yield from _texts(task)
    else:
        for batch in _batches(read_rows(task.chunk, task.keys, raw=task.tokenizer == BYTE_IDS.name)):
            yield from (each for each in _rows(batch, task) if not each.is_empty)


def _texts(task: ChunkTask) -> Iterator[Encoded]:
    """Yield the texts or the conversations of a chunk."""
    tokenizer, begin, end, kinds = cached_tokenizer(task.tokenizer), _begin(task), _end(task), set()
    raw = task.tokenizer == BYTE_IDS.name
    for batch in _batches(read_chunk(task.chunk, task.keys.text, raw=raw)):
        texts = [document for document in batch if isinstance(document, str)]
        kinds |= {isinstance(document, str) for document in batch}
        if len(kinds) > 1:
            raise UserError(
                f"{task.chunk.files[0]} has texts and conversations under {task.keys.text!r}: split the file"
            )
        if texts and task.sentences is not None:
            found = (_split(text, task.sentences, tokenizer, end) for text in texts)
        elif texts:
            found = (Encoded(np.concatenate([begin, each, end])) for each in tokenizer.encode(texts))
        elif task.add_bos:
            raise UserError("the documents are conversations, which their chat template begins\nomit --add-bos")
        else:
            template = _cached_chat_template(task.tokenizer)
            found = (Encoded(*template.encode(document)) for document in batch if not isinstance(document, str))
        yield from (each for each in found if not each.is_empty)


def _split(text: str, language: str, tokenizer: TextTokenizer, end: Tokens) -> Encoded:
    """Return a text whose sentences are encoded one by one. `end` belongs to the last."""
    each = [tokens for tokens in tokenizer.encode(sentences_of(text, language)) if len(tokens)]
    each = [*each[:-1], np.append(each[-1], end)] if each else [np.zeros(0, np.int64)]
    return Encoded(np.concatenate(each), sentences=tuple(map(len, each)))


def _begin(task: ChunkTask) -> npt.NDArray[np.int64]:
    """Return the token that begins each document, or none."""
    return np.array([cached_tokenizer(task.tokenizer).ids.bos] if task.add_bos else [], np.int64)


def _end(task: ChunkTask) -> npt.NDArray[np.int64]:
    """Return the token that ends each document, or none."""
    return np.array([cached_tokenizer(task.tokenizer).ids.eos] if task.append_eos else [], np.int64)


def _rows(batch: list[Row], task: ChunkTask) -> Iterator[Encoded]:
    """Yield the rows of a batch with labels or targets."""
    tokenizer, keys, end = cached_tokenizer(task.tokenizer), task.keys, _end(task)
    plain = [row for row in batch if not isinstance(row.text, list)]
    texts = iter(tokenizer.encode([text_of(row.text, row.where, keys.text) for row in plain]))
    targets: Iterator[Tokens | None] = iter([None] * len(batch))
    if keys.target is not None:
        targets = iter(tokenizer.encode([text_of(row.target, row.where, keys.target) for row in batch]))
    for row, target in zip(batch, targets, strict=True):
        words = None
        if isinstance(row.text, list):
            if not row.text:
                continue
            tokens, words = tokenizer.encode_words([text_of(word, row.where, keys.text) for word in row.text])
        else:
            tokens = next(texts)
        label = _labels_of_tokens(row, len(tokens), words, keys) if isinstance(row.label, list) else row.label
        label = [*label, *[IGNORED] * len(end)] if isinstance(label, list) else label
        tokens = np.append(tokens, end) if len(tokens) else tokens
        target = target if target is None or not len(target) else np.append(target, end)
        yield Encoded(tokens, target=target, label=label, row=row)


def _labels_of_tokens(row: Row, count: int, words: npt.NDArray[np.int64] | None, keys: Keys) -> list[Any]:
    """Return the label of each token: as given or, of words, that of a word at its first token and none at others."""
    given, wanted, unit = row.label, count, "tokens"
    if words is not None:
        wanted, unit = len(row.text), "words"
    if len(given) != wanted:
        raise UserError(
            f"{row.where()} has {len(given):,} labels under {keys.label!r} for {wanted:,} {unit} under {keys.text!r}\n"
            "give one label for each word of a list, or for each token of a text"
        )
    if words is None:
        return list(given)
    firsts = np.concatenate([[True], words[1:] != words[:-1]]) if count else np.zeros(0, bool)
    return [given[word] if first else IGNORED for word, first in zip(words.tolist(), firsts, strict=True)]


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield lists of documents or rows of about BATCH_CHARACTERS."""
    batch: list[Any] = []
    size = 0
    for item in items:
        batch.append(item)
        size += _characters(item.text if isinstance(item, Row) else item)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _characters(document: Document) -> int:
    """Return the number of characters of a text; of a conversation or of words an estimate."""
    return len(document) if isinstance(document, str) else BATCH_CHARACTERS // 64
