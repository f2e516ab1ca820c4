"""The ids that a tokenizer gives to tokens, as far as samples need them."""

from __future__ import annotations

from attrs import frozen

BYTES = 256


@frozen
class Template:
    """The special tokens that a tokenizer puts around a text, and around the two texts of a pair, with token types."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    pair: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] = ((), (), ())  # before, between and after
    types: tuple[int, ...] = (0, 1)  # of each special token of a pair in order, a text standing for one of them

    @property
    def count(self) -> int:
        """Return the number of special tokens around a text."""
        return len(self.before) + len(self.after)


@frozen
class TokenIds:
    """Number of ids and special ids of a tokenizer."""

    vocab: int  # ids of text are below
    eos: int | None = None  # ends a document
    pad: int | None = None
    mask: int | None = None
    sentinels: tuple[int, ...] = ()  # replace removed spans, first one first
    name: str = "bytes"
    template: Template = Template()
    bos: int | None = None  # begins a document, if it is asked for

    @property
    def unit(self) -> str:
        """Return the word for a token: byte or token."""
        return "byte" if self.name == BYTE_IDS.name else "token"


BYTE_IDS = TokenIds(BYTES, eos=0, pad=0)
"""Text as bytes: one token per byte, and a zero byte after each file."""
