"""Grouped expert products give the results of one product per expert, on any layout."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.launch import launcher
from megaloom.runtime.training import verify
from tests.support.limits import LIMIT

LAYOUTS = {
    "EP2": ("tiny_mixtral", Layout(dp=2, ep=2, shard="optimizer")),
    "TP2 SP ETP2": ("tiny_mixtral", Layout(tp=2, sequence_parallel=True, etp=2)),
    "shared ones, activations made again": (
        "tiny_deepseek_v3",
        Layout(recompute=Recompute.SELECTIVE, recompute_modules=("moe_act", "layernorm")),
    ),
    "biases": ("tiny_gpt_oss", Layout()),
    "biases, EP2": ("tiny_gpt_oss", Layout(dp=2, ep=2)),
}


def curves(plan: Plan, together: bool) -> tuple[verify.Curve, int]:
    """On each rank: three steps, and how many products of several experts there were."""
    from megaloom.runtime.modules import experts

    plain, calls = experts.grouped_product, 0

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return plain(*args)

    experts.grouped_product = counted
    if together:

        def grouped(self: Any) -> bool:
            return len(self.local_experts) > 1

        experts.Experts.grouped = property(grouped, lambda self, value: None)  # type: ignore[assignment]
    return verify.short_run(plan, 3, 1234), calls


@pytest.mark.parametrize("row", LAYOUTS)
def test_experts_together_compute_what_each_does(row: str, plan_of: Any) -> None:
    name, layout = LAYOUTS[row]
    plan = plan_of(name, layout)
    (one, none), (all_, some) = (
        launcher.run(curves, (plan, grouped), layout.world, timeout=LIMIT)[0] for grouped in (False, True)
    )
    comparison = verify.Comparison(all_, one, 1e-6)
    assert comparison.agrees, f"losses differ by {comparison.loss_error:.1e}, norms by {comparison.norm_error:.1e}"
    assert none == 0
    assert some > 0


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
