"""Intervals of a plan in words: the runs that they come from, and the chance that memory does not suffice."""

from __future__ import annotations

from math import isclose

from megaloom.dsl.quoting import printable
from megaloom.planner.contract.devices import GiB
from megaloom.planner.contract.plans import Plan

LEAST_CHANCE = 0.01  # chance of running out of memory from which on a plan says it


def interval_text(plan: Plan) -> str:
    """Return a sentence on the interval of a plan whose cluster is calibrated; empty for other clusters."""
    calibration, p = plan.cluster.calibration, plan.predicted
    if calibration is None:
        return ""
    source = f"{printable(plan.cluster.source)} is calibrated from {calibration.runs} runs"
    if all(isclose(end, of * p.step_seconds) for end, of in zip(p.interval, calibration.step, strict=True)):
        return f"{source}: the interval is that of their errors, each predicted from the others."
    classes = "; ".join(calibration.classes)
    return (
        f"{source} of Megatron-core ({classes}). This plan is for another runtime or class: the figures are fitted, "
        "but the interval is that of published runs."
    )


def overflow_text(plan: Plan) -> str:
    """Return a sentence on the chance that a plan runs out of memory; empty for one below 1 %."""
    p = plan.predicted
    if p.overflow is None or p.nbytes_high is None or p.overflow < LEAST_CHANCE:
        return ""
    return (
        f"The chance that memory does not suffice is {p.overflow:.0%}: a GPU may need {p.nbytes_high / GiB:.1f} GiB "
        f"(in 19 of 20 runs no more) of {plan.cluster.device.nbytes / GiB:.1f}."
    )
