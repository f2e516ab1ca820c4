"""Checkpoints of runs that shard gradients or weights: each rank saves its rows, and they load under any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megaloom.dsl.catalog import find
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.launch import launcher
from tests.runtime.checkpoints.test_declared_names import under_both
from tests.support.batches import next_token
from tests.support.limits import LIMIT
from tests.support.paths import TEST_MODELS

GRADIENTS, WEIGHTS = Layout(dp=2, shard="gradients"), Layout(dp=2, shard="weights")
NONE, OPTIMIZER = Layout(dp=2), Layout(dp=2, shard="optimizer")
CP, SP, PP = Layout(cp=2, shard="weights"), Layout(tp=2, sequence_parallel=True), Layout(pp=2)
EP, ETP = Layout(dp=2, ep=2, shard="weights"), Layout(dp=2, etp=2, shard="weights")
OWN = f"{TEST_MODELS / 'own_layers.py'}:gated"
RESHARDS = [
    ("tiny_llama", WEIGHTS, SP),
    ("tiny_llama", SP, WEIGHTS),
    ("tiny_llama", GRADIENTS, OPTIMIZER),
    ("tiny_gpt", NONE, GRADIENTS),
    ("tiny_gpt", OPTIMIZER, WEIGHTS),
    ("tiny_gpt", WEIGHTS, PP),
    ("tiny_vit", CP, GRADIENTS),
    ("tiny_llama_lora", WEIGHTS, SP),
    ("tiny_gpt_lora", SP, WEIGHTS),
    ("tiny_mixtral", WEIGHTS, EP),
    ("tiny_mixtral", EP, ETP),
    ("tiny_gpt_oss", ETP, WEIGHTS),
    ("uneven_t5", WEIGHTS, SP),
    ("own-module", GRADIENTS, SP),
    ("own-module", SP, WEIGHTS),
]
"""Models, each with a layout to save under, and one to load under."""


def test_losses_go_on_under_another_layout(plan_of: Callable[..., Plan], tmp_path: Path) -> None:
    cases = [(plan_of(name, before), plan_of(name, after)) for name, before, after in RESHARDS]
    outcomes, *_ = launcher.run(under_both, (cases, tmp_path), 2, timeout=LIMIT)
    for (name, before, after), outcome in zip(RESHARDS, outcomes, strict=True):
        for ours, theirs in zip(outcome.resumed, outcome.straight, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5), f"{name}: {before} to {after}"


DENSE = [
    Layout(dp=2, tp=2, sequence_parallel=True, shard="weights"),
    Layout(dp=2, pp=2, vpp=2, shard="weights"),
    Layout(dp=4, shard="gradients"),
]
SPARSE = [
    *DENSE,
    Layout(dp=4, ep=2, shard="weights"),
    Layout(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True, shard="optimizer"),
]
"""Layouts of one chain: each run goes on from the checkpoint of the run before."""


def continued(plan: Plan, folder: Path, steps: int) -> list[tuple[float, float, float]]:
    """On each rank: go on for some steps, and save. Return loss, gradient norm, and the loss of the averages."""
    from megaloom.runtime import Recipe, shard

    engine, out = shard(find(plan.model)[0], plan, Recipe(steps=10, warmup=0, lr=1e-2), average=0.5), []
    done = engine.load(folder)
    for step in range(done, done + steps):
        batch = torch.arange(8 * 33).reshape(8, 33) * (step + 3) % 61
        result = engine.step(lambda k, batch=batch: next_token(batch[k]))
        with engine.averaged_weights():
            average = engine.evaluate_samples(lambda k, batch=batch: next_token(batch[k]), 8).loss
        out.append((result.loss, result.grad_norm, average))
    engine.save(folder)
    return out


def continued_under(plan: Plan, folder: Path, steps: int) -> list[tuple[float, float, float]]:
    return launcher.run(continued, (plan, folder, steps), plan.layout.world, timeout=LIMIT)[0]


@pytest.mark.parametrize(
    ("name", "precision", "layouts", "within"),
    [("tiny_mixtral", "fp32", SPARSE, 1e-5), ("tiny_llama", "bf16", DENSE, 0.01)],
)
def test_moments_and_averages_go_on(
    name: str, precision: str, layouts: list[Layout], within: float, plan_of: Callable[..., Plan], tmp_path: Path
) -> None:
    expected = continued_under(
        plan_of(name, Layout(), batch=8, precision=precision), tmp_path / "alone", 2 * len(layouts)
    )
    plans = [plan_of(name, layout, batch=8, precision=precision) for layout in layouts]
    found = [row for plan in plans for row in continued_under(plan, tmp_path / "chain", 2)]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=within)
