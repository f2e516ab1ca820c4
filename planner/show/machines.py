"""What a search or a plan says to machines: JSON's own types, whose names stay.

Protocol: `for_machines` is one plan, `searched` a search.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import asdict

from megaloom.planner.cluster import GiB
from megaloom.planner.cost.memory import upper
from megaloom.planner.plan import Plan
from megaloom.planner.search.goodput import goodput

from .explain import exposed, fullest

if TYPE_CHECKING:
    from megaloom.planner.search.search import Found


def searched(found: Found, top: int, params: int) -> dict[str, Any]:
    """The search's result as JSON: the best layouts, best first, what was rejected; of an interrupted one its doubt."""
    return {
        "plans": [{**for_machines(p), "goodput": _lasting(p, params)} for p in (found.best, *found.others)[:top]],
        "rejected": [{"layout": asdict(r.layout), "cause": r.cause} for r in found.rejected],
        **({} if found.unproven is None else {"unproven": found.unproven}),
    }


def _lasting(plan: Plan, params: int) -> dict[str, Any] | None:
    found = goodput(params, plan.workload.precision, plan.cluster, plan.predicted.step_seconds)
    return None if found is None else asdict(found)


def for_machines(plan: Plan) -> dict[str, Any]:
    """A plan, its predictions in seconds and GiB."""
    p = plan.predicted
    return {
        "model": plan.model,
        "fingerprint": plan.fingerprint,
        "gpus": str(plan.cluster),
        "workload": asdict(plan.workload),
        "layout": asdict(plan.layout),
        "predicted": {
            "step_seconds": p.step_seconds,
            "step_seconds_low": p.within[0],
            "step_seconds_high": p.within[1],
            "memory_gib": fullest(plan) / GiB,
            "memory_gib_upper": max(map(upper, p.nbytes)) / GiB,
            "tokens_per_second_per_gpu": p.tokens_per_second_per_device,
            "tflops_per_gpu": p.flops_per_second_per_device / 1e12,
            "mfu": p.mfu,
            "bubble": p.bubble,
            "exposed_communication": exposed(plan),
            "breakdown_seconds": p.breakdown,
            "memory_moment_by_rank": list(p.moments),
            "memory_gib_by_rank": [{holder: n / GiB for holder, n in rank.items()} for rank in p.nbytes],
        },
        "stages": [asdict(stage) for stage in plan.stages],
        "reasons": list(plan.reasons),
    }
