"""Grouped expert products give the results of one product per expert, on any layout."""

from typing import Any

import pytest

from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.launch import launcher
from megaloom.runtime.training import verify

LAYOUTS = {
    "EP2": ("tiny_mixtral", Layout(dp=2, ep=2, shard="optimizer")),
    "TP2 SP ETP2": ("tiny_mixtral", Layout(tp=2, sequence_parallel=True, etp=2)),
    "shared ones, activations made again": (
        "tiny_deepseek_v3",
        Layout(recompute=Recompute.SELECTIVE, recompute_modules=("moe_act", "layernorm")),
    ),
    "expert by expert where biases follow": ("tiny_gpt_oss", Layout()),
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
            return len(self.local_experts) > 1 and self.local_experts[0].linear_fc2.bias is None

        experts.Experts.grouped = property(grouped, lambda self, value: None)  # type: ignore[assignment]
    return verify.short_run(plan, 3, 1234), calls


@pytest.mark.parametrize("row", LAYOUTS)
def test_experts_together_compute_what_each_does(row: str, plan_of: Any) -> None:
    name, layout = LAYOUTS[row]
    plan = plan_of(name, layout)
    (one, none), (all_, some) = (
        launcher.run(curves, (plan, grouped), layout.world, timeout=60)[0] for grouped in (False, True)
    )
    comparison = verify.Comparison(all_, one, 1e-6)
    assert comparison.agrees, f"losses differ by {comparison.loss_error:.1e}, norms by {comparison.norm_error:.1e}"
    assert none == 0
    assert (some > 0) is (name != "tiny_gpt_oss")
