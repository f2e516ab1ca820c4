"""The tokens that a sampler chooses after each step, when sequences end, and their broadcast to all ranks.

`parents[i]` is the row that token i continues. Finished rows are dropped; beam search reorders and repeats rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from attrs import field, frozen
from torch import Tensor

from megaloom.runtime.megatron import device

from .settings import GenerationSettings

ENDED = -1  # in place of a parent


@frozen
class SampledTokens:
    """Tokens, and for each the row of this step that it follows; ENDED if the sequence ends with it."""

    parents: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def going_on(self) -> tuple[tuple[int, int], ...]:
        """Return the rows that go on, each with its next token."""
        return tuple((p, t) for p, t in zip(self.parents, self.tokens, strict=True) if p != ENDED)


@frozen
class Completion:
    """One finished sequence."""

    prompt: int  # number of the prompt in its batch
    number: int  # of the sequence among those of its prompt
    tokens: tuple[int, ...]  # without the prompt, with the token that ended it
    reason: str  # "eos", "stop" or "length"
    score: float | None = None  # of beam search: log probability / length ** length_penalty


@frozen
class Ending:
    """When a sequence ends: at a token, at a text, or at the largest length.

    forced: the token with which each sequence begins, and that with which it ends at the largest length, if any.
    vocab: ids from here on are not in the tokenizer, so they are chosen only if they are forced or end a sequence.
    """

    settings: GenerationSettings
    eos: frozenset[int]
    decode: Callable[[tuple[int, ...]], str] = field(repr=False)
    forced: tuple[tuple[int, ...], ...] = ()
    vocab: int | None = None

    def reason(self, tokens: tuple[int, ...]) -> str | None:
        """Return why a sequence ends with these tokens; None if it goes on."""
        if tokens[-1] in self.eos:
            return "eos"
        if self.settings.stop_strings and any(x in self.decode(tokens) for x in self.settings.stop_strings):
            return "stop"
        return "length" if len(tokens) >= self.most else None

    @property
    def most(self) -> int:
        """Return the most tokens of a sequence."""
        assert self.settings.max_new_tokens is not None, "the length is decided before"
        return self.settings.max_new_tokens

    def with_known(self, logits: Tensor) -> Tensor:
        """Return logits [rows, vocab] with -inf for the ids that the tokenizer does not have."""
        if self.vocab is None or self.vocab >= logits.shape[1]:
            return logits
        kept = [i for i in (*self.eos, *(i for ids in self.forced for i in ids)) if self.vocab <= i < logits.shape[1]]
        out = logits.clone()
        out[:, self.vocab :] = -torch.inf
        out[:, kept] = logits[:, kept]
        return out

    def with_forced(self, scores: Tensor, length: int) -> Tensor:
        """Return scores [rows, vocab] after `length` tokens: only a forced token remains, if there is one."""
        first, last = self.forced or ((), ())
        forced = (first if length == 0 else ()) or (last if length == self.most - 1 else ())
        if not forced:
            return scores
        only = torch.full_like(scores, -torch.inf)
        only[:, forced[0]] = 0.0
        return only


class Sampler(Protocol):
    """Chooses the tokens of a batch, and collects the sequences that end."""

    finished: list[Completion]

    def sample(self, logits: Tensor) -> SampledTokens:
        """Return the next tokens of rows whose logits are [rows, vocab]."""


def broadcast_tokens(sampled: SampledTokens | None, rows: int, source: int) -> SampledTokens:
    """Return on all ranks the tokens of rank `source`, for at most `rows` rows. Other ranks give None."""
    if dist.get_world_size() == 1:
        assert sampled is not None
        return sampled
    message = torch.zeros(1 + 2 * rows, dtype=torch.int64, device=device.current())
    if sampled is not None:
        count = len(sampled.tokens)
        values = torch.tensor([count, *sampled.parents, *sampled.tokens])
        message[: len(values)] = values.to(message)
    dist.broadcast(message, source)
    count, *values = message.tolist()
    return SampledTokens(tuple(values[:count]), tuple(values[count : 2 * count]))
