"""What a search or a plan says to machines: JSON's own types, whose names stay.

Protocol: `for_machines` is one plan, `searched` a search, `scaled` the best layouts on a row of clusters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from attrs import asdict

from megaloom.planner.contract.devices import Cluster, GiB
from megaloom.planner.contract.layout import layout_to_json
from megaloom.planner.contract.plans import Plan, Prediction
from megaloom.planner.cost.measured_memory import upper_bytes
from megaloom.planner.search.goodput import goodput
from megaloom.planner.search.step_difference import peak_nbytes

from .text import exposed

if TYPE_CHECKING:
    from megaloom.planner.search.scaling import ScalingPoint
    from megaloom.planner.search.search import Found
    from megaloom.planner.simulate.price import Priced


def searched(found: Found, top: int, params: int) -> dict[str, Any]:
    """The search's result as JSON: the best layouts, best first; others near the best, each with what it loses by.

    That is a rule, memory or time. Of an interrupted search also how much may be gained yet.
    """
    plans = (found.best, *found.next(top - 1))
    near = {r.layout: r.cause for r in (*found.rejected, *found.slower)}
    return {
        "plans": [{**for_machines(p), "goodput": _lasting(p, params)} for p in plans],
        "rejected": [
            {"layout": layout_to_json(x), "cause": cause}
            for x, cause in near.items()
            if all(x != p.layout for p in plans)
        ],
        **({} if found.unproven is None else {"unproven": found.unproven}),
    }


def _lasting(plan: Plan, params: int) -> dict[str, Any] | None:
    found = goodput(params, plan.workload.precision, plan.cluster, plan.predicted.step_seconds)
    return None if found is None else asdict(found)


def for_machines(plan: Plan) -> dict[str, Any]:
    """A plan, its predictions in seconds and GiB."""
    return {
        "model": plan.model,
        "fingerprint": plan.fingerprint,
        "runtime": plan.runtime,
        "gpus": str(plan.cluster),
        "workload": asdict(plan.workload),
        "layout": layout_to_json(plan.layout),
        "predicted": _predicted(plan.predicted),
        "stages": [asdict(stage) for stage in plan.stages],
        "reasons": list(plan.reasons),
    }


def scaled(found: Iterable[ScalingPoint], params: int) -> dict[str, Any]:
    """The best layout on each of some clusters; of one on which nothing is legal and fits, the cluster alone."""
    return {"points": [{"gpus": str(p.cluster), **(_of(p.cluster, p.best, params) if p.best else {})} for p in found]}


def _of(machine: Cluster, best: Priced, params: int) -> dict[str, Any]:
    workload = best.partition.problem.job.workload
    lasting = goodput(params, workload.precision, machine, best.seconds)
    return {
        "workload": asdict(workload),
        "layout": layout_to_json(best.layout),
        "predicted": _predicted(best.prediction),
        "goodput": None if lasting is None else asdict(lasting),
    }


def _predicted(p: Prediction) -> dict[str, Any]:
    return {
        "step_seconds": p.step_seconds,
        "step_seconds_low": p.interval[0],
        "step_seconds_high": p.interval[1],
        "memory_gib": peak_nbytes(p) / GiB,
        "memory_gib_upper": max(map(upper_bytes, p.nbytes)) / GiB,
        "tokens_per_second_per_gpu": p.tokens_per_second_per_device,
        "tflops_per_gpu": p.flops_per_second_per_device / 1e12,
        "mfu": p.mfu,
        "bubble": p.bubble,
        "exposed_communication": exposed(p),
        "breakdown_seconds": p.breakdown,
        "memory_moment_by_rank": list(p.moments),
        "memory_gib_by_rank": [{holder: n / GiB for holder, n in rank.items()} for rank in p.nbytes],
    }
