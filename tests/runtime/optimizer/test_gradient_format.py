"""Gradients that are added up and reduced in bf16: half the memory, as planned, and the result but for rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from megaloom.planner.contract.choices import GradReduce
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from tests.support.batches import next_token, random_text
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named

RECIPE = Recipe(steps=10, lr=1e-2, warmup=0)
TYPES = {GradReduce.FP32: torch.float32, GradReduce.BF16: torch.bfloat16}


def sample(i: int) -> dict[str, torch.Tensor]:
    return next_token(random_text(i, 127, 32))


def curves(plan: Plan, folder: str) -> dict[GradReduce, tuple[list[float], int, set[torch.dtype]]]:
    """On each rank, by format of gradients: losses and norms of steps, bytes of gradients, and their types.

    The last step continues the checkpoint of the run in the other format.
    """
    from megaloom.runtime.engine.engine import Engine

    engines, out = {}, {}
    for grad_reduce in GradReduce:
        made = evolve(plan, layout=evolve(plan.layout, grad_reduce=grad_reduce))
        engine = engines[grad_reduce] = Engine.build(made, model_named(plan.model), RECIPE)
        buffers = [b.grad_data for chunk in engine.state.chunks for b in chunk.buffers]
        steps = [engine.step(lambda i, step=step: sample(4 * step + i)) for step in range(2)]
        engine.save(Path(folder) / str(grad_reduce))
        gradients = engine.gradients(sample)
        assert gradients is None or all(g.value.isfinite().all() for g in gradients.values())
        values = [x for r in steps for x in (r.loss, r.grad_norm)]
        out[grad_reduce] = values, sum(x.nbytes for x in buffers), {x.dtype for x in buffers}
    for grad_reduce, other in zip(GradReduce, reversed(GradReduce), strict=True):
        engines[grad_reduce].load(Path(folder) / str(other))
        result = engines[grad_reduce].step(lambda i: sample(8 + i))
        out[grad_reduce][0].extend((result.loss, result.grad_norm))
    return out


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, shard="optimizer", overlaps=("gradients",)),
        Layout(pp=2),
    ],
    ids=str,
)
def test_gradients_in_bf16_are_those_in_fp32_but_for_rounding(layout: Layout, plan_of: Any, tmp_path: Any) -> None:
    plan = plan_of("tiny_gpt", layout, precision="bf16")
    for rank, found in enumerate(launcher.run(curves, (plan, str(tmp_path)), 2, timeout=LIMIT)):
        (wide, nbytes, _), (narrow, halved, _) = found.values()
        assert narrow == pytest.approx(wide, rel=2e-2)
        assert narrow != wide
        assert nbytes == 2 * halved
        assert {x: types for x, (*_, types) in found.items()} == {x: {kind} for x, kind in TYPES.items()}
        planned = plan.predicted.nbytes[rank % layout.pp]["gradients"]
        assert nbytes == pytest.approx(planned, rel=0.01)
