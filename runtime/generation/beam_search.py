"""Beam search, as `transformers` 5 defines it (generation/utils.py: _beam_search), for each prompt of a batch alone.

Each step has num_beams running sequences of a prompt. Of all their continuations the most probable ones are candidates:
num_beams times the number of tokens that end a sequence plus one, at least two. Candidates that end join the finished
sequences with the score log probability / length ** length_penalty; the best others go on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from .sampled_tokens import Completion, Ending, SampledTokens
from .sampling import penalized
from .settings import EarlyStopping, GenerationSettings

NEVER = -1e9
"""The score of a sequence that does not exist, as in transformers."""


@frozen
class _Candidate:
    """A continuation of a running sequence."""

    beam: int  # number of the running sequence that it continues
    tokens: tuple[int, ...]
    score: float  # log probability
    reason: str | None  # why it ends, None if it goes on


@define(eq=False)
class _Search:
    """The beams of one prompt."""

    prompt: int
    context: tuple[int, ...]
    settings: GenerationSettings
    most: int  # tokens of a sequence
    running: list[tuple[tuple[int, ...], float]]  # tokens and log probability
    finished: list[Completion] = field(factory=list)  # the best ones, best first
    done: bool = False

    def advance(self, candidates: list[_Candidate]) -> list[_Candidate]:
        """Take the candidates of a step, best first, and return those that go on."""
        s, count = self.settings, self.settings.num_beams
        length = len(candidates[0].tokens)
        ended = [c for c in candidates[:count] if c.reason is not None]
        scored = [
            Completion(self.prompt, 0, c.tokens, c.reason or "", c.score / length**s.length_penalty) for c in ended
        ]
        self.finished = sorted([*self.finished, *scored], key=lambda x: -(x.score or 0.0))[:count]
        going_on = [c for c in candidates if c.reason is None]
        self.running = [(c.tokens, c.score) for c in going_on[:count]]
        self.done = not self.running or self._is_decided(length)
        return going_on[:count]

    def _is_decided(self, length: int) -> bool:
        """Return whether the search ends, because no running sequence is likely to beat the finished ones."""
        s = self.settings
        if len(self.finished) < s.num_beams:
            return False
        if s.early_stopping is EarlyStopping.TRUE:
            return True
        longest = s.early_stopping is EarlyStopping.NEVER and s.length_penalty > 0
        best = self.running[0][1] / (self.most if longest else length) ** s.length_penalty
        return best <= (self.finished[-1].score or 0.0)


@define(eq=False)
class BeamSearch:
    """Chooses tokens by beam search. A prompt whose search has ended leaves the batch."""

    ending: Ending
    searches: list[_Search]
    finished: list[Completion] = field(factory=list)

    @classmethod
    def of(cls, ending: Ending, prompts: Sequence[tuple[int, ...]]) -> BeamSearch:
        """Return the sampler for a batch of prompts, each with num_beams equal rows."""
        count = ending.settings.num_beams
        first = [((), 0.0), *(((), NEVER) for _ in range(count - 1))]
        return cls(
            ending, [_Search(i, prompt, ending.settings, ending.most, list(first)) for i, prompt in enumerate(prompts)]
        )

    def sample(self, logits: Tensor) -> SampledTokens:
        """Return the next token of each beam that goes on."""
        settings, parents, tokens = self.ending.settings, list[int](), list[int]()
        start, searches = 0, self.searches
        for search in searches:
            stop = start + len(search.running)
            for c in search.advance(self._candidates(search, logits[start:stop])):
                if not search.done:
                    parents.append(start + c.beam)
                    tokens.append(c.tokens[-1])
            if search.done:
                best = search.finished[: settings.num_return_sequences]
                self.finished += [evolve(sequence, number=k) for k, sequence in enumerate(best)]
            start = stop
        self.searches = [search for search in searches if not search.done]
        return SampledTokens(tuple(parents), tuple(tokens))

    def _candidates(self, search: _Search, logits: Tensor) -> list[_Candidate]:
        """Return the most probable continuations of the running sequences, best first."""
        settings, eos = self.ending.settings, len(self.ending.eos)
        written = [(*search.context, *tokens) for tokens, _ in search.running]
        scores = penalized(self.ending.with_known(logits).log_softmax(-1), written, settings)
        scores = self.ending.with_forced(scores, len(search.running[0][0]))
        scores = scores + torch.tensor([score for _, score in search.running], device=scores.device)[:, None]
        most = min(max(2, 1 + eos) * settings.num_beams, scores.numel())
        best, indices = scores.flatten().topk(most)
        out = []
        for score, index in zip(best.tolist(), indices.tolist(), strict=True):
            beam, token = divmod(index, scores.shape[1])
            tokens = (*search.running[beam][0], token)
            out.append(_Candidate(beam, tokens, score, self.ending.reason(tokens)))
        return out
