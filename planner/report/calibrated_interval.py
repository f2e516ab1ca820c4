"""The interval of a plan on a calibrated cluster, in words: the runs that it comes from, or why it is not theirs."""

from __future__ import annotations

from math import isclose

from megaloom.dsl.quoting import printable
from megaloom.planner.contract.plans import Plan


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
