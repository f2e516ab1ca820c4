"""Weight gradients that products add to the buffers of DDP are those that autograd would have added."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from megaloom.planner.contract.capability import ADDED_GRADIENTS
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from tests.support.batches import next_token, random_text
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named

LAYOUTS = {
    "tied table, biases": ("tiny_gpt", Layout()),
    "sequence parallel": ("tiny_llama", Layout(tp=2, sequence_parallel=True)),
    "table on two ranks": ("tiny_gpt", Layout(pp=2)),
    "experts": ("tiny_mixtral", Layout(dp=2, ep=2, shard="optimizer", overlaps=("gradients",))),
    "sharded weights": ("tiny_llama", Layout(dp=2, shard="weights")),
}


def gradients(plan: Plan, fused: bool) -> tuple[dict[str, torch.Tensor], int]:
    """On each rank: the gradients of a step, on rank 0, and how many products were added to buffers."""
    from megaloom.runtime.engine.engine import Engine
    from megaloom.runtime.megatron import environment, fused_gradients

    add, calls = fused_gradients.add_weight_gradient, 0

    def counted(*args: Any) -> None:
        nonlocal calls
        calls += 1
        add(*args)

    fused_gradients.add_weight_gradient = counted
    fused_gradients.use_torch_products()
    here = environment.current_environment()
    assert ADDED_GRADIENTS not in here.backends  # on a CPU
    backends = (*here.backends, ADDED_GRADIENTS) if fused else here.backends
    environment.current_environment = lambda: evolve(here, backends=backends)
    engine = Engine.build(plan, model_named(plan.model), Recipe(steps=2))
    found = engine.gradients(lambda i: next_token(random_text(i, 127, 32)))
    return {name: g.value for name, g in (found or {}).items()}, calls


@pytest.mark.parametrize("row", LAYOUTS)
def test_added_gradients_are_those_of_autograd(row: str, plan_of: Any) -> None:
    name, layout = LAYOUTS[row]
    plan = plan_of(name, layout)
    (expected, none), (found, some) = (
        launcher.run(gradients, (plan, fused), layout.world, timeout=LIMIT)[0] for fused in (False, True)
    )
    assert found.keys() == expected.keys() and expected
    for weight, value in found.items():
        assert torch.allclose(value, expected[weight], rtol=1e-4, atol=1e-6 * float(value.abs().max())), weight
    assert none == 0
    assert (some > 0) is not layout.fsdp


@pytest.mark.parametrize("total", [torch.float32, torch.bfloat16])
def test_a_product_is_added(total: torch.dtype) -> None:
    from megaloom.runtime.megatron.fused_gradients import add_weight_gradient

    inputs, gradient = torch.randn(6, 3).bfloat16(), torch.randn(6, 4).bfloat16()
    found = torch.ones(4, 3, dtype=total)
    add_weight_gradient(inputs, gradient, found)
    assert torch.allclose(found.float(), 1 + gradient.float().T @ inputs.float(), rtol=2e-2, atol=2e-2)
    add_weight_gradient(inputs[:0], gradient[:0], found)  # an expert without tokens
    assert found.isfinite().all()
