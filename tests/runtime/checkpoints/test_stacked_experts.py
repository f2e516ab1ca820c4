"""Checkpoints do not depend on whether experts have one parameter for each product or one each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.launch import launcher
from tests.runtime.checkpoints.test_resharding import continued
from tests.support.limits import LIMIT
from tests.support.stacked_experts import stack_experts

CHAIN = [
    (True, Layout(dp=4, ep=2, shard="optimizer", overlaps=("gradients",))),
    (False, Layout(dp=2, shard="weights")),
    (True, Layout(dp=4, ep=2, shard="weights")),
    (False, Layout()),
]
"""Runs that each resume from the checkpoint of the run before: whether their experts are stacked, and their layout."""
OVER_ETP = [
    (False, Layout(dp=2, etp=2, shard="optimizer")),
    (True, Layout(tp=2, sequence_parallel=True, etp=2)),
    (True, Layout(dp=4, etp=2, shard="weights")),
]


def continued_stacked(plan: Plan, folder: Path, steps: int) -> list[tuple[float, float, float]]:
    """On each rank: go on with stacked experts for some steps, and save. Return the results of `continued`."""
    stack_experts()
    return continued(plan, folder, steps)


@pytest.mark.parametrize(
    ("name", "precision", "chain", "within"),
    [
        ("tiny_gpt_oss", "fp32", CHAIN, 1e-5),
        ("tiny_mixtral", "fp32", OVER_ETP, 1e-5),
        ("tiny_mixtral", "bf16", CHAIN[:3], 0.01),
    ],
)
def test_moments_and_averages_go_on(
    name: str,
    precision: str,
    chain: list[tuple[bool, Layout]],
    within: float,
    plan_of: Callable[..., Plan],
    tmp_path: Path,
) -> None:
    plans = [(stacked, plan_of(name, layout, batch=8, precision=precision)) for stacked, layout in chain]
    found, expected = [], []
    for stacked, plan in plans:
        run, size = (continued_stacked if stacked else continued), plan.layout.world
        found += launcher.run(run, (plan, tmp_path / "stacked", 2), size, timeout=LIMIT)[0]
        expected += launcher.run(continued, (plan, tmp_path / "apart", 2), size, timeout=LIMIT)[0]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=within)
