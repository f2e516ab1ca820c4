"""Draws follow the probabilities that are left, and depend on the seed and the numbers of a sequence only."""

from collections import Counter
from typing import Any

import pytest
import torch

from megaloom.runtime.generation.beam_search import BeamSearch
from megaloom.runtime.generation.sampled_tokens import ENDED, Ending, SampledTokens
from megaloom.runtime.generation.sampling import RowSampler
from megaloom.runtime.generation.settings import GenerationSettings

PROBABILITIES = torch.tensor([0.4, 0.3, 0.2, 0.1])


def sampler(prompts: int = 1, first: int = 0, **options: Any) -> RowSampler:
    settings = GenerationSettings(**{"max_new_tokens": 100, "do_sample": True} | options)
    ending = Ending(settings, frozenset(), lambda tokens: "".join("abcd"[t] for t in tokens))
    return RowSampler.of(ending, [(0,)] * prompts, first)


def drawn(count: int = 4000, **options: Any) -> list[float]:
    """The share of each token in one draw of many sequences."""
    choice = sampler(num_return_sequences=count, **options).sample(PROBABILITIES.log().expand(count, -1))
    counts = Counter(choice.tokens)
    return [counts[token] / count for token in range(4)]


def near(found: list[float], expected: list[float]) -> bool:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 0.03


def test_draws_follow_probabilities() -> None:
    assert near(drawn(), [0.4, 0.3, 0.2, 0.1])
    assert near(drawn(top_k=2), [4 / 7, 3 / 7, 0, 0])
    assert near(drawn(top_p=0.65), [4 / 7, 3 / 7, 0, 0])
    squares = [16 / 30, 9 / 30, 4 / 30, 1 / 30]
    assert near(drawn(temperature=0.5), squares)
    assert drawn(top_k=1) == [1, 0, 0, 0]


def test_a_draw_depends_on_seed_and_numbers_only() -> None:
    logits = PROBABILITIES.log().expand(8, -1)
    together = sampler(8, seed=3).sample(logits).tokens
    alone = tuple(sampler(1, first=i, seed=3).sample(logits[:1]).tokens[0] for i in range(8))
    assert together == alone
    assert len(set(together)) > 1
    assert together != sampler(8, seed=4).sample(logits).tokens


def test_rows_end_at_a_text_or_at_the_largest_length() -> None:
    greedy = sampler(2, do_sample=False, stop_strings=("ba",), max_new_tokens=3)
    one_hot = torch.eye(4)
    assert greedy.sample(one_hot[[1, 1]]) == SampledTokens((0, 1), (1, 1))
    assert greedy.sample(one_hot[[0, 2]]) == SampledTokens((ENDED, 1), (0, 2))
    assert greedy.sample(one_hot[[3]]) == SampledTokens((ENDED,), (3,))
    assert [(x.prompt, x.tokens, x.reason) for x in greedy.finished] == [(0, (1, 0), "stop"), (1, (1, 2, 3), "length")]


def test_forced_tokens_are_first_and_last() -> None:
    settings = GenerationSettings(max_new_tokens=3)
    forced = RowSampler.of(Ending(settings, frozenset(), str, ((3,), (2,))), [(0,)])
    logits = PROBABILITIES.log()[None]
    assert [forced.sample(logits).tokens[0] for _ in range(3)] == [3, 0, 2]


@pytest.mark.parametrize("options", [{"do_sample": True}, {}, {"num_beams": 2}, {"repetition_penalty": 2.0}])
def test_ids_beyond_the_tokenizer_are_never_chosen(options: dict[str, Any]) -> None:
    """Not the most probable ones, nor by beams; a token that ends a sequence is."""
    settings = GenerationSettings(max_new_tokens=9, **options)
    logits = torch.tensor([0.0, 0.1, 5.0, 4.0, 3.0]).expand(settings.copies, -1)
    for eos, allowed in ((frozenset[int](), {0, 1}), (frozenset({4}), {0, 1, 4})):
        ending = Ending(settings, eos, str, vocab=2)
        seen = set()
        for first in range(20 if settings.do_sample else 1):
            make = BeamSearch.of(ending, [(0,)]) if settings.num_beams > 1 else RowSampler.of(ending, [(0,)], first)
            seen |= {*make.sample(logits).tokens, *(t for x in make.finished for t in x.tokens)}
        assert seen <= allowed
        assert (4 in seen) or not eos or settings.num_beams > 1
