"""Grouped experts compute what one product per expert computes, on any layout, and have few gradients to add."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from megaloom.runtime.training import verify
from tests.support.batches import next_token, random_text
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named
from tests.support.stacked_experts import stack_experts

MIXTRAL = "tiny_mixtral"
LAYOUTS = {
    "EP2": (MIXTRAL, Layout(dp=2, ep=2, shard="optimizer")),
    "DP2": (MIXTRAL, Layout(dp=2)),
    "DP2, overlapped": (MIXTRAL, Layout(dp=2, shard="optimizer", overlaps=("gradients", "weights"))),
    "TP2 SP ETP2": (MIXTRAL, Layout(tp=2, sequence_parallel=True, etp=2)),
    "PP2 VPP2, recomputed": (MIXTRAL, Layout(pp=2, vpp=2, recompute=Recompute.FULL)),
    "shared ones, activations made again": (
        "tiny_deepseek_v3",
        Layout(recompute=Recompute.SELECTIVE, recompute_modules=("moe_act", "layernorm")),
    ),
    "sharded gradients, EP2": (MIXTRAL, Layout(dp=4, ep=2, shard="gradients")),
    "sharded weights": ("tiny_gpt_oss", Layout(dp=2, shard="weights")),
    "sharded weights, ETP2": (MIXTRAL, Layout(dp=4, etp=2, shard="weights", recompute=Recompute.FULL)),
    "frozen ones": ("tiny_experts_lora", Layout(dp=2, shard="optimizer")),
    "biases": ("tiny_gpt_oss", Layout()),
    "biases, EP2": ("tiny_gpt_oss", Layout(dp=2, ep=2)),
}


def outcome(plan: Plan, stacked: bool) -> tuple[verify.Curve, dict[str, torch.Tensor], list[str], int]:
    """On each rank: three steps; the gradients of another, on rank 0; the names of parameters of experts; and how many
    tensors the host has waited for."""
    from megatron.core.transformer.moe import token_dispatcher

    from megaloom.runtime.engine.engine import Engine

    move, waits = token_dispatcher.maybe_move_tensor_to_cpu, 0

    def counted(*args: Any, **rest: Any) -> Any:
        nonlocal waits
        waits += 1
        return move(*args, **rest)

    token_dispatcher.maybe_move_tensor_to_cpu = counted
    if stacked:
        stack_experts()
    curve = verify.short_run(plan, 3, 1234)
    engine = Engine.build(plan, model_named(plan.model), Recipe(steps=2))
    found = engine.gradients(lambda i: next_token(random_text(i, 61, 32)))
    names = [name for chunk in engine.model_chunks for name, _ in chunk.named_parameters() if ".experts." in name]
    return curve, {name: g.value for name, g in (found or {}).items()}, names, waits


@pytest.mark.parametrize("row", LAYOUTS)
def test_stacked_experts_compute_what_each_does(row: str, plan_of: Any) -> None:
    name, layout = LAYOUTS[row]
    plan = plan_of(name, layout)
    ranks, stacked = (launcher.run(outcome, (plan, how), layout.world, timeout=LIMIT) for how in (False, True))
    (one, expected, *_), (all_, found, *_) = ranks[0], stacked[0]
    comparison = verify.Comparison(all_, one, 1e-6)
    assert comparison.agrees, f"losses differ by {comparison.loss_error:.1e}, norms by {comparison.norm_error:.1e}"
    assert found.keys() == expected.keys() and expected
    for weight, value in found.items():
        assert torch.allclose(value, expected[weight], rtol=1e-4, atol=1e-6 * float(value.abs().max())), weight
    single, few = ([name for *_, names, _ in each for name in names] for each in (ranks, stacked))
    assert single and all(".local_experts." in name for name in single)
    assert few and all(re.search(r"\.experts\.linear_fc[12]\.(weight|bias)$", name) for name in few)
    assert sum(waits for *_, waits in ranks) > 0
    assert (sum(waits for *_, waits in stacked) > 0) is (layout.ep * layout.etp > 1)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_gated_units_are_those_of_megatron_core(limit: float | None) -> None:
    from megatron.core.activations import quick_gelu
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megaloom.runtime.modules.experts import BiasOnly, gated_units

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=6,
        num_attention_heads=1,
        gated_linear_unit=True,
        activation_func=quick_gelu,
        activation_func_clamp_value=limit,
        glu_linear_offset=1.0,
    )
    expert = SimpleNamespace(
        config=config, activation_func=quick_gelu, linear_fc1=BiasOnly(None), linear_fc2=BiasOnly(None)
    )
    up, scales = torch.randn(5, 8), torch.rand(5)
    expected, _ = MLP.forward(expert, up, scales)
    torch.testing.assert_close(gated_units(up, scales, quick_gelu, 1.0, limit), expected)
