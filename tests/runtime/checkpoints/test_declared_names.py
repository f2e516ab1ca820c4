"""Checkpoints have the names of the declaration, whether a module of megatron-core runs a layer or its body does."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import frozen

from megaloom.dsl import graph
from megaloom.dsl.catalog import find
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.module_kinds import runs_as_module
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.checkpoints.checkpoint_folder import latest
from megaloom.runtime.launch import launcher
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.weights.safe_pickle import read_metadata
from tests.support.batches import next_token
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named
from tests.support.parity.rank_pool import process_group
from tests.support.paths import TEST_MODELS, TESTS

DP, CP, SP = Layout(dp=2, shard="optimizer"), Layout(cp=2), Layout(tp=2, sequence_parallel=True)
ETP, EP = Layout(dp=2, etp=2), Layout(dp=2, ep=2, shard="optimizer")
BIASED = f"{TEST_MODELS / 'small.py'}:biased_experts"
FLIPS = [
    ("tiny_vit", DP, CP),
    ("tiny_vit", SP, DP),
    ("tiny_vit", CP, SP),  # the body under both
    ("tiny_llava", CP, DP),
    ("tiny_llava", DP, SP),
    ("tiny_gpt_oss", ETP, EP),
    ("tiny_gpt_oss", DP, ETP),
    (BIASED, EP, ETP),
    (BIASED, ETP, SP),
]
"""Models, each with a layout to save under, and one to load under."""


@frozen
class Outcome:
    """Losses and gradient norms of steps 3 and 4, without a break and after the checkpoint was loaded elsewhere."""

    straight: list[tuple[float, float]]
    resumed: list[tuple[float, float]]


def under_both(cases: list[tuple[Plan, Plan]], folder: Path) -> list[Outcome]:
    """On each of two ranks: train four steps, save after two, and load into another layout."""
    from megaloom.runtime.checkpoints import checkpoint
    from megaloom.runtime.training.verify import ShortRun
    from tests.runtime.checkpoints.test_checkpoint import manifest

    store: Any = dist.distributed_c10d._get_default_store()
    rank, out = dist.get_rank(), []
    dist.destroy_process_group()
    for i, (before, after) in enumerate(cases):
        run, curves = folder / str(i), []
        for name, plan, start in (("before", before, 0), ("after", after, 2)):
            with process_group(store, f"{name} {i}", rank, 2):
                short = ShortRun.of(plan, model_named(plan.model), 4, seed=1)
                if start:
                    found = latest(run, fingerprint="1-feed")
                    assert found
                    checkpoint.load(short.engine.state, found)
                steps = []
                for step in range(start, 4):
                    result = short.engine.step(lambda k, step=step, short=short: short.sample(step, k))
                    steps.append((result.loss, result.grad_norm))
                    if short.engine.done == 2:
                        checkpoint.save(short.engine.state, run, manifest(2))
                curves.append(steps[-2:])
        out.append(Outcome(*curves))
    return out


def test_a_checkpoint_loads_where_a_layer_runs_by_its_body(plan_of: Callable[..., Plan], tmp_path: Path) -> None:
    cases = [(plan_of(name, before), plan_of(name, after)) for name, before, after in FLIPS]
    outcomes, *_ = launcher.run(under_both, (cases, tmp_path), 2, timeout=LIMIT)
    for i, ((name, before, after), outcome) in enumerate(zip(FLIPS, outcomes, strict=True)):
        for ours, theirs in zip(outcome.resumed, outcome.straight, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5), f"{name}: {before} to {after}"
        weights = graph(find(cases[i][0].model)[0]).weights
        stored = read_metadata(tmp_path / str(i) / "step-000002").state_dict_metadata
        for prefix in ("", "exp_avg.", "exp_avg_sq."):
            sizes = {prefix + n: tuple(d.known for d in s.dims) for n, s in weights.items()}
            assert {n: tuple(stored[n].size) for n in sizes} == sizes
        assert len(stored) == 3 * len(weights)  # nothing else
    for name, *pair in FLIPS:
        if (name, *pair) != ("tiny_vit", CP, SP):
            assert len({modules_of(name, layout) for layout in pair}) == 2, f"{name} runs the same modules under {pair}"


def modules_of(name: str, layout: Layout) -> frozenset[str]:
    """The nodes that a module runs under a layout."""
    g = graph(find(f"{TEST_MODELS / 'small.py'}:{name}" if name.isidentifier() else name)[0])
    return frozenset(n.name for n in g.nodes if n.weights and runs_as_module(n, layout.split))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(dp=2, tp=2, ep=2, etp=1, shard="optimizer", sequence_parallel=True),
        Layout(tp=2, pp=2, sequence_parallel=True),
    ],
    ids=str,
)
def test_a_checkpoint_of_version_2_loads(layout: Layout, plan_of: Callable[..., Plan], tmp_path: Path) -> None:
    """Saved under dp2 tp2 ep2 by the last version whose tensors had the names of parameters of modules: 0f6b4f7."""
    with tarfile.open(TESTS / "golden" / "checkpoint-v2.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    expected = json.loads((tmp_path / "expected.json").read_text())
    plan = plan_of("golden_moe", layout, seq=16)
    steps, averages = launcher.run(continued, (plan, tmp_path), layout.world, timeout=LIMIT)[0]
    for step, golden in zip(steps, expected, strict=True):
        assert step == pytest.approx(golden, abs=1e-5)
    assert averages == pytest.approx(AVERAGED_LOSS, abs=1e-5)


AVERAGED_LOSS = 4.12960109859705  # of 0f6b4f7


def continued(plan: Plan, run: Path) -> tuple[list[dict[str, float]], float]:
    """On each rank: steps 3 and 4 from a checkpoint of step 2, and the loss of its averaged weights before."""
    from megaloom.runtime import shard

    recipe = Recipe(steps=10, warmup=3, lr=1e-2)
    engine = shard(model_named(plan.model), plan, recipe, average=0.9)
    assert engine.load(run) == 2
    batches = [torch.arange(4 * 17).reshape(4, 17) * (step + 3) % 61 for step in (2, 3)]
    with engine.averaged_weights():
        loss = engine.evaluate_samples(lambda i: next_token(batches[0][i]), 4).loss
    steps = []
    for tokens in batches:
        result = engine.step(lambda i, tokens=tokens: next_token(tokens[i]))
        steps.append({"loss": result.loss, "grad_norm": result.grad_norm, "lr": result.lr})
    return steps, loss
