"""Samples of one document, or of the two texts of a pair: special tokens around them, and padding at their end."""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from megaloom.runtime.data.labels import IGNORED
from megaloom.runtime.data.token_ids import TokenIds

PADDING_INDEX = 1  # the document index of padding; that of the text is 0


@frozen(eq=False)
class PaddedText:
    """A text with special tokens and padding, [length] each."""

    tokens: Tensor
    is_text: Tensor  # bool: neither a special token nor padding
    types: Tensor  # token types
    documents: Tensor  # 0, and PADDING_INDEX at padding

    @property
    def is_padding(self) -> Tensor:
        """Return whether each position is padding."""
        return self.documents == PADDING_INDEX


def padded_text(text: Tensor, ids: TokenIds, length: int, *, padding: int | None = None) -> PaddedText:
    """Return a text between the special tokens of the tokenizer. A longer one is cut at its end.

    padding: the id of padding; None is that of the tokenizer, or 0.
    """
    template = ids.template
    own = text[: max(0, length - template.count)].tolist()
    parts = [(template.before, False, 0), (own, True, 0), (template.after, False, 0)]
    return _padded(parts, length, (ids.pad or 0) if padding is None else padding)


def padded_pair(first: Tensor, second: Tensor, ids: TokenIds, length: int) -> PaddedText:
    """Return the two texts of a pair in one sequence. The longer text is cut until both fit."""
    before, between, after = ids.template.pair
    most = max(0, length - len(before) - len(between) - len(after))
    a, b = len(first), len(second)
    if a + b > most:
        a, b = (most - b, b) if b <= most // 2 else (a, most - a) if a <= most // 2 else (most - most // 2, most // 2)
    types = iter(ids.template.types)
    pieces = [
        (before, False),
        (first[:a].tolist(), True),
        (between, False),
        (second[:b].tolist(), True),
        (after, False),
    ]
    parts: list[tuple[list[int] | tuple[int, ...], bool, int]] = []
    for tokens, is_text in pieces:
        if is_text:
            parts.append((tokens, True, next(types)))
        else:
            parts += [([token], False, next(types)) for token in tokens]
    return _padded(parts, length, ids.pad or 0)


def _padded(parts: list[tuple[list[int] | tuple[int, ...], bool, int]], length: int, padding: int) -> PaddedText:
    """Return parts of a sequence: their tokens, whether they are text, and their token type; then padding."""
    tokens, is_text, types = np.full(length, padding, np.int64), np.zeros(length, bool), np.zeros(length, np.int64)
    at = 0
    for own, text, kind in parts:
        stop = min(length, at + len(own))
        tokens[at:stop], is_text[at:stop], types[at:stop] = list(own)[: stop - at], text, kind
        at = stop
    documents = np.where(np.arange(length) < at, 0, PADDING_INDEX)
    return PaddedText(*(torch.from_numpy(x) for x in (tokens, is_text, types, documents)))


def labels_of_tokens(labels: Tensor, is_text: Tensor) -> tuple[Tensor, Tensor]:
    """Return the label of each position, 0 where there is none, and whether it has one, [length] each.

    labels: of the tokens of the text. is_text: whether each position is one of them, [length].
    """
    out = torch.full(is_text.shape, IGNORED)
    out[is_text] = labels[: int(is_text.sum())]
    counted = out != IGNORED
    return out.where(counted, 0), counted
