"""Checkpoints of runs that shard gradients or weights: each rank saves its rows, and they load under any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attrs import evolve

from megaloom.dsl import graph
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.checkpoints.checkpoint_folder import latest
from megaloom.runtime.convert.run_weights import checkpoint_weights
from megaloom.runtime.launch import launcher
from megaloom.runtime.modules.initial_weights import initial_weight
from megaloom.runtime.weights.views import held
from tests.runtime.checkpoints.test_declared_names import under_both
from tests.support.batches import next_token
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named
from tests.support.paths import TEST_MODELS

GRADIENTS, WEIGHTS = Layout(dp=2, shard="gradients"), Layout(dp=2, shard="weights")
OPTIMIZER = Layout(dp=2, shard="optimizer")
CP, SP, PP = Layout(cp=2, shard="weights"), Layout(tp=2, sequence_parallel=True), Layout(pp=2)
EP, ETP = Layout(dp=2, ep=2, shard="weights"), Layout(dp=2, etp=2, shard="weights")
OWN_EXPERTS = Layout(dp=2, shard="optimizer", expert_shard="weights")
OWN = f"{TEST_MODELS / 'own_layers.py'}:gated"
RESHARDS = [
    ("tiny_llama", SP, WEIGHTS),
    ("tiny_llama", GRADIENTS, OPTIMIZER),
    ("tiny_gpt", OPTIMIZER, WEIGHTS),
    ("tiny_gpt", WEIGHTS, PP),
    ("tiny_vit", CP, GRADIENTS),
    ("tiny_llama_lora", WEIGHTS, SP),
    ("tiny_gpt_lora", SP, WEIGHTS),
    ("tiny_mixtral", EP, ETP),
    ("tiny_gpt_oss", ETP, WEIGHTS),
    ("tiny_mixtral", OWN_EXPERTS, evolve(WEIGHTS, expert_shard="gradients")),
    ("tiny_mixtral", PP, OWN_EXPERTS),
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
    Layout(dp=4, ep=2, shard="weights", expert_shard="optimizer"),
    Layout(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True, shard="optimizer"),
]
"""Layouts of one chain: each run goes on from the checkpoint of the run before."""


def continued(plan: Plan, folder: Path, steps: int) -> list[tuple[float, float, float]]:
    """On each rank: go on for some steps, and save. Return loss, gradient norm, and the loss of the averages."""
    from megaloom.runtime import shard

    engine, out = shard(model_named(plan.model), plan, Recipe(steps=10, warmup=0, lr=1e-2), average=0.5), []
    done = engine.load(folder)
    for step in range(done, done + steps):
        batch = torch.arange(8 * 33).reshape(8, 33) * (step + 3) % 61
        result = engine.step(lambda k, batch=batch: next_token(batch[k]))
        with engine.averaged_weights():
            average = engine.evaluate_samples(lambda k, batch=batch: next_token(batch[k]), 4).loss
        out.append((result.loss, result.grad_norm, average))
    engine.save(folder)
    return out


def continued_under(plan: Plan, folder: Path, steps: int) -> list[tuple[float, float, float]]:
    return launcher.run(continued, (plan, folder, steps), plan.layout.world, timeout=LIMIT)[0]


@pytest.mark.parametrize(
    ("name", "precision", "layouts", "within"),
    [("tiny_mixtral", "fp32", SPARSE, 1e-5), ("tiny_llama_4", "bf16", DENSE[::2], 0.01)],
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


def saved(plan: Plan, folder: Path, given: dict[str, torch.Tensor] | None) -> Path:
    """On each rank: save at step 0, from initial or given weights, and return the folder."""
    from megaloom.runtime import shard

    views = None if given is None else {name: held(x) for name, x in given.items()}
    return shard(model_named(plan.model), plan, Recipe(), weights=views).save(folder).parent


@pytest.mark.parametrize(("name", "layout"), [("tiny_gpt_oss", EP), ("tiny_llama", GRADIENTS), ("uneven_t5", CP)])
def test_a_checkpoint_has_the_weights_that_the_run_started_from(
    name: str, layout: Layout, plan_of: Callable[..., Plan], tmp_path: Path
) -> None:
    """Initial ones, which each rank has drawn for its rows, and given ones; read as `--from` and `convert` do."""
    plan = plan_of(name, layout)
    g = graph(model_named(plan.model))
    initial, given = ({n: initial_weight(s, seed).read() for n, s in g.weights.items()} for seed in (Recipe().seed, 99))
    for number, (start, expected) in enumerate([(None, initial), (given, given)]):
        run = launcher.run(saved, (plan, tmp_path / str(number), start), 2, timeout=LIMIT)[0]
        checkpoint = latest(run, fingerprint=plan.fingerprint)
        assert checkpoint
        found = checkpoint_weights(g, checkpoint)
        assert found.keys() == expected.keys()
        assert [n for n, x in expected.items() if not torch.equal(found[n].read(), x)] == []
