"""Training with each overlap computes the result of training without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.planner.contract.choices import Overlap
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from tests.support.batches import next_token, random_text
from tests.support.limits import LIMIT
from tests.support.paths import TEST_MODELS

RECIPE = Recipe(steps=10, lr=1e-2, warmup=0)
SHARES = Layout(dp=2, shard="optimizer")
PIECE = 1000  # elements of what is exchanged at once: a piece or more for each weight, as of a large model
SWITCHES = ((), (Overlap.GRADIENTS,), (Overlap.GRADIENTS, Overlap.WEIGHTS))
CASES = {  # tied weights, chunks that are asked for in turn, experts' own shares, blocks made again, bodies
    "tied": ("tiny_gpt", SHARES),
    "chunks": ("deep_llama", evolve(SHARES, pp=2, vpp=2)),
    "experts": ("tiny_mixtral", evolve(SHARES, ep=2, recompute="full")),
    "bodies": (f"{TEST_MODELS / 'own_layers.py'}:balanced", SHARES),
}


def sample(i: int) -> dict[str, torch.Tensor]:
    return next_token(random_text(i, 127, 32))


def curves(plans: list[Plan]) -> list[tuple[list[float], bool]]:
    """On each rank, one plan after the other: see `curve`."""
    from megatron.core import parallel_state

    results = []
    for plan in plans:
        results.append(curve(plan))
        parallel_state.destroy_model_parallel()
    return results


def curve(plan: Plan) -> tuple[list[float], bool]:
    """Losses of three steps and of an evaluation after each; whether modules wait for their weights."""
    from megaloom.runtime.engine.engine import Engine

    recipe = evolve(RECIPE, ddp_bucket_size=PIECE) if plan.layout.has_overlap(Overlap.GRADIENTS) else RECIPE
    engine = Engine.build(plan, find(plan.model)[0], recipe)
    buckets = sum(len(buffer.buckets) for chunk in engine.state.chunks for buffer in chunk.buffers)
    if plan.layout.pp == 1:  # later pipeline ranks have one bucket: nothing waits for their gradients
        assert (buckets > 2) is plan.layout.has_overlap(Overlap.GRADIENTS)
    losses = []
    for step in range(3):
        losses.append(engine.step(lambda i, step=step: sample(4 * step + i)).loss)
        losses.append(engine.evaluate_samples(sample, 4).loss)
    return losses, all(chunk.use_forward_hook for chunk in engine.state.chunks)


@pytest.mark.parametrize("case", CASES)
def test_training_computes_the_same(case: str, plan_of: Any) -> None:
    name, layout = CASES[case]
    plans = [plan_of(name, evolve(layout, overlaps=on)) for on in SWITCHES]
    results = launcher.run(curves, (plans,), layout.world, timeout=LIMIT)[0]
    assert [waits for _, waits in results] == [False, False, True]
    none, gradients, weights = (losses for losses, _ in results)
    assert gradients == pytest.approx(none, rel=1e-6)  # the norm of gradients adds up their pieces in another order
    assert weights == gradients
    assert len(set(none)) == 6


def test_buckets_need_an_overlap() -> None:
    recipe = Recipe(ddp_bucket_size=PIECE)
    with pytest.raises(UserError, match="--ddp-bucket-size 1000 has no effect: under this layout"):
        recipe.check_layout(evolve(SHARES, overlaps=()))
    recipe.check_layout(evolve(SHARES, overlaps=(Overlap.GRADIENTS,)))
