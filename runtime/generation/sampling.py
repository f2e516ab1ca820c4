"""Sampling of one token for each row: the most probable one, or a draw.

Changes of the logits are transformers' own classes. A draw depends on the seed, the prompt's number, the sequence's
number and the position only, not on the layout or on other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from .sampled_tokens import ENDED, Completion, Ending, SampledTokens
from .settings import GenerationSettings


@define(eq=False)
class _Row:
    """A sequence that goes on."""

    prompt: int
    number: int  # among the sequences of its prompt
    context: tuple[int, ...]  # the prompt, which the repetition penalty counts
    random: np.random.Generator
    tokens: tuple[int, ...] = ()


@define(eq=False)
class RowSampler:
    """Chooses tokens row by row. Sequences that end leave the batch."""

    ending: Ending
    rows: list[_Row]
    finished: list[Completion] = field(factory=list)

    @classmethod
    def of(cls, ending: Ending, prompts: Sequence[tuple[int, ...]], first: int = 0) -> RowSampler:
        """Return the sampler for a batch of prompts. first: the number of the first prompt among all."""
        settings = ending.settings
        return cls(
            ending,
            [
                _Row(i, k, prompt, np.random.default_rng([settings.seed, first + i, k]))
                for i, prompt in enumerate(prompts)
                for k in range(settings.copies)
            ],
        )

    def sample(self, logits: Tensor) -> SampledTokens:
        """Return the next token of each row, and drop the rows that end."""
        settings = self.ending.settings
        logits = penalized(self.ending.with_known(logits), ((*row.context, *row.tokens) for row in self.rows), settings)
        logits = self.ending.with_forced(logits, len(self.rows[0].tokens))
        tokens = self._drawn(logits) if settings.do_sample else logits.argmax(-1).tolist()
        parents, going_on = [], []
        for i, (row, token) in enumerate(zip(self.rows, tokens, strict=True)):
            row.tokens = (*row.tokens, token)
            reason = self.ending.reason(row.tokens)
            parents.append(i if reason is None else ENDED)
            if reason is None:
                going_on.append(row)
            else:
                self.finished.append(Completion(row.prompt, row.number, row.tokens, reason))
        self.rows = going_on
        return SampledTokens(tuple(parents), tuple(tokens))

    def _drawn(self, logits: Tensor) -> list[int]:
        """Return a token of each row, drawn by its probability: where a uniform number falls in their sums."""
        sums = warped(logits, self.ending.settings).softmax(-1).cumsum(-1)
        uniform = torch.tensor([row.random.random() for row in self.rows], dtype=sums.dtype, device=sums.device)
        found = torch.searchsorted(sums, (uniform * sums[:, -1])[:, None], right=True)[:, 0]
        last = (sums < sums[:, -1:]).sum(-1)  # the last token with a probability
        tokens: list[int] = torch.minimum(found, last).tolist()
        return tokens


def penalized(scores: Tensor, written: Iterable[tuple[int, ...]], settings: GenerationSettings) -> Tensor:
    """Return scores [rows, vocab] after the repetition penalty of the tokens of each row."""
    if settings.repetition_penalty == 1.0:
        return scores
    from transformers.generation import logits_process

    process = logits_process.RepetitionPenaltyLogitsProcessor(settings.repetition_penalty)
    rows = zip(written, scores.split(1), strict=True)
    return torch.cat([process(torch.tensor([tokens], device=row.device), row) for tokens, row in rows])


def warped(logits: Tensor, settings: GenerationSettings) -> Tensor:
    """Return logits [rows, vocab] after temperature, top-k and top-p, in transformers' order."""
    from transformers.generation import logits_process

    processes = [logits_process.TemperatureLogitsWarper(settings.temperature)] if settings.temperature != 1.0 else []
    if settings.top_k is not None:
        processes.append(logits_process.TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1.0:
        processes.append(logits_process.TopPLogitsWarper(settings.top_p))
    for process in processes:
        logits = process(None, logits)
    return logits
