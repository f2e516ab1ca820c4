"""Tokenizers in memory: bytes, a tokenizer.json and a SentencePiece model, with one interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from .indexed import smallest_token_type
from .token_ids import BYTE_IDS, TokenIds

Tokens = npt.NDArray[np.integer]


class TextTokenizer(Protocol):
    """Turns text into tokens and back."""

    @property
    def ids(self) -> TokenIds:
        """Return the number of ids and the special ids."""

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Return the id of each token, without tokens that were added to a trained tokenizer."""

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text, without special tokens."""

    def encode_words(self, words: Sequence[str]) -> tuple[Tokens, npt.NDArray[np.int64]]:
        """Return the tokens of a text that is given as words, and the number of the word of each token."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""


@frozen
class ByteTokenizer:
    """One token per byte of UTF-8."""

    ids: TokenIds = BYTE_IDS

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Return the id of each byte."""
        return {chr(i): i for i in range(self.ids.vocab)}

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the bytes of each text. Surrogates stand for bytes that are no UTF-8."""
        return [np.frombuffer(text.encode(errors="surrogateescape"), np.uint8) for text in texts]

    def encode_words(self, words: Sequence[str]) -> tuple[Tokens, npt.NDArray[np.int64]]:
        """Return the bytes of words, each with the space after it, and the number of the word of each byte."""
        return _words_one_by_one(self, [f"{word} " for word in words])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes; the zero byte ends a document and is left out."""
        return bytes(t for t in tokens if 0 < t < BYTE_IDS.vocab).decode(errors="replace")


@frozen
class JsonTokenizer:
    """A tokenizer.json, through the library `tokenizers`."""

    backend: Any = field(repr=False)  # tokenizers.Tokenizer
    ids: TokenIds

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Return the id of each token of the model, without added ones."""
        known: dict[str, int] = self.backend.get_vocab(with_added_tokens=False)
        return known

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text."""
        kind = smallest_token_type(self.ids.vocab)
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(e.ids, kind) for e in encoded]

    def encode_words(self, words: Sequence[str]) -> tuple[Tokens, npt.NDArray[np.int64]]:
        """Return the tokens of words, and the number of the word of each."""
        encoded = self.backend.encode(list(words), is_pretokenized=True, add_special_tokens=False)
        return np.array(encoded.ids, smallest_token_type(self.ids.vocab)), np.array(encoded.word_ids, np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self.backend.decode(list(tokens), skip_special_tokens=True))


@frozen
class SentencePieceTokenizer:
    """A SentencePiece model, through the library `sentencepiece`."""

    backend: Any = field(repr=False)  # sentencepiece.SentencePieceProcessor
    ids: TokenIds

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Return the id of each piece."""
        return {self.backend.id_to_piece(i): i for i in range(self.ids.vocab)}

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text."""
        return [np.array(e, smallest_token_type(self.ids.vocab)) for e in self.backend.encode(list(texts))]

    def encode_words(self, words: Sequence[str]) -> tuple[Tokens, npt.NDArray[np.int64]]:
        """Return the tokens of words, and the number of the word of each."""
        return _words_one_by_one(self, words)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self.backend.decode([int(t) for t in tokens]))


def _words_one_by_one(tokenizer: TextTokenizer, words: Sequence[str]) -> tuple[Tokens, npt.NDArray[np.int64]]:
    """Return the tokens of words that are encoded by themselves, and the number of the word of each."""
    each = tokenizer.encode(words)
    return np.concatenate(each), np.repeat(np.arange(len(each)), [len(tokens) for tokens in each])
