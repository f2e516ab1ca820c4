"""An evaluation counts each sample once, whatever their number and the layout."""

from typing import Any

import pytest
import torch
from attrs import evolve

from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from tests.support.batches import next_token, random_text
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named

TP2 = Layout(tp=2, sequence_parallel=True)
COUNTS = (1, 3, 4, 5, 11)  # of samples; a global batch has 4
LAYOUTS = {
    "DP2": ("tiny_llama", Layout(dp=2)),
    "DP4 micro-batch 1": ("tiny_llama", Layout(dp=4)),
    "DP2 micro-batch 2": ("tiny_llama", Layout(dp=2, micro_batch=2)),
    "PP2 VPP2": ("deep_llama", Layout(pp=2, vpp=2)),
    "TP2 SP CP2": ("tiny_gpt", evolve(TP2, cp=2)),
    "EP2 PP2": ("tiny_mixtral", Layout(dp=2, ep=2, pp=2)),
}


def sample(i: int) -> dict[str, torch.Tensor]:
    return next_token(random_text(i, 127, 32))


def evaluated(plan: Plan, counts: tuple[int, ...], alone: bool = False) -> list[tuple[float, int]]:
    """On each rank: loss and tokens of the first samples, for each count; `alone` evaluates sample by sample."""
    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, model_named(plan.model), Recipe())
    if alone:
        return [
            (r.loss, r.tokens)
            for r in (engine.evaluate_samples(lambda _, i=i: sample(i), 1) for i in range(max(counts)))  # type: ignore[misc]
        ]
    return [(r.loss, r.tokens) for r in (engine.evaluate_samples(sample, count) for count in counts)]


@pytest.mark.parametrize("case", LAYOUTS)
def test_each_sample_counts_once(case: str, plan_of: Any) -> None:
    name, layout = LAYOUTS[case]
    losses = [loss for loss, _ in launcher.run(evaluated, (plan_of(name, Layout()), COUNTS, True), 1, timeout=LIMIT)[0]]
    ranks = launcher.run(evaluated, (plan_of(name, layout), COUNTS), layout.world, timeout=LIMIT)
    assert all(rank == ranks[0] for rank in ranks)
    assert [tokens for _, tokens in ranks[0]] == [32 * count for count in COUNTS]
    means = [sum(losses[:count]) / count for count in COUNTS]
    assert [loss for loss, _ in ranks[0]] == pytest.approx(means, abs=1e-5)
