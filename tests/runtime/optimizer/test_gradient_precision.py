"""Gradients that are added up and reduced in bf16: half the memory, and the result but for rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from tests.support.batches import next_token, random_text
from tests.support.limits import LIMIT

RECIPE = Recipe(steps=10, lr=1e-2, warmup=0)
IN_BF16 = evolve(RECIPE, grad_reduce_in_bf16=True)


def sample(i: int) -> dict[str, torch.Tensor]:
    return next_token(random_text(i, 127, 32))


def curves(plan: Plan) -> list[tuple[list[float], int, set[torch.dtype]]]:
    """On each rank, in fp32 and in bf16: losses and gradient norms of steps, bytes of gradients, and their types."""
    from megaloom.runtime.engine.engine import Engine

    out = []
    for recipe in (RECIPE, IN_BF16):
        engine = Engine.build(plan, find(plan.model)[0], recipe)
        buffers = [b.grad_data for chunk in engine.state.chunks for b in chunk.buffers]
        steps = [engine.step(lambda i, step=step: sample(4 * step + i)) for step in range(3)]
        gradients = engine.gradients(sample)
        assert gradients is None or all(g.value.isfinite().all() for g in gradients.values())
        values = [x for r in steps for x in (r.loss, r.grad_norm)]
        out.append((values, sum(x.nbytes for x in buffers), {x.dtype for x in buffers}))
    return out


@pytest.mark.parametrize(
    "layout", [Layout(dp=2, shard="optimizer", overlaps=("gradients",)), Layout(tp=2, sequence_parallel=True)], ids=str
)
def test_gradients_in_bf16_are_those_in_fp32_but_for_rounding(layout: Layout, plan_of: Any) -> None:
    plan = plan_of("tiny_gpt", layout, precision="bf16")
    for (expected, nbytes, types), (found, halved, types_halved) in launcher.run(curves, (plan,), 2, timeout=LIMIT):
        assert found == pytest.approx(expected, rel=2e-2)
        assert found != expected
        assert (nbytes, types, types_halved) == (2 * halved, {torch.float32}, {torch.bfloat16})


def test_other_precisions_are_refused() -> None:
    for precision in (Precision.FP32, Precision.FP16):
        with pytest.raises(UserError, match=rf"--grad-reduce-in-bf16 is for --precision bf16, .* is {precision}\nomit"):
            IN_BF16.check_plan(Layout(), precision)
    IN_BF16.check_plan(Layout(), Precision.BF16)
