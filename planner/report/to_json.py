"""The JSON that `plan --json` and `megaloom explain --json` print.

Names of fields are part of the interface: JSON_VERSION goes up when one changes. Times are in seconds, memory in GiB.
`plan_json` is one plan, `search_json` a search, `scaling_json` the best layouts of a scaling table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attrs import asdict

from megaloom.planner.contract.devices import Cluster, GiB
from megaloom.planner.contract.plan_json import layout_to_json
from megaloom.planner.contract.plans import Plan, Prediction
from megaloom.planner.report.goodput import goodput
from megaloom.planner.search.reasons import peak_nbytes

from .run_cost import cost_json, costs_of_points, fewest_devices, run_cost
from .tables import exposed_communication
from .token_budget import TokenBudget

if TYPE_CHECKING:
    from megaloom.planner.search.scaling import ScalingPoint
    from megaloom.planner.search.search import Found
    from megaloom.planner.simulate.price import Priced

JSON_VERSION = 2


def search_json(result: Found, top: int, params: int, budget: TokenBudget | None = None) -> dict[str, Any]:
    """Return a search as JSON: the best layouts, best first, and similar layouts with the cause why they lose.

    `slower_than_fastest` is the share by which the first is slower than the fastest layout, which is less simple. A
    cause is a rule, memory or time. An interrupted search has `possible_gain`: the share of its step time by which the
    best layout may still be improved. With a budget each plan has `run`: the days and money for its tokens.
    """
    plans = (result.best, *result.next(top - 1))
    best, fastest = (plan.predicted.step_seconds for plan in (result.best, result.fastest))
    near = {r.layout: r.cause for r in (*result.rejected, *result.slower)}
    return {
        "version": JSON_VERSION,
        "slower_than_fastest": max(0.0, best / fastest - 1),
        "plans": [{**_plan(p), "goodput": _goodput(p, params), **_run(p, params, budget)} for p in plans],
        "rejected": [
            {"layout": layout_to_json(x), "cause": cause}
            for x, cause in near.items()
            if all(x != p.layout for p in plans)
        ],
        **({} if result.gap is None else {"possible_gain": result.gap}),
    }


def _goodput(plan: Plan, params: int) -> dict[str, Any] | None:
    estimate = goodput(params, plan.workload.precision, plan.cluster, plan.predicted.step_seconds)
    return None if estimate is None else asdict(estimate)


def _run(plan: Plan, params: int, budget: TokenBudget | None) -> dict[str, Any]:
    if budget is None:
        return {}
    return {"run": cost_json(run_cost(plan.cluster, plan.workload, plan.predicted, params, budget), budget)}


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return one plan as JSON: layout, predictions, stages and reasons."""
    return {"version": JSON_VERSION, **_plan(plan)}


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.model,
        "fingerprint": plan.fingerprint,
        "runtime": plan.runtime,
        "gpus": str(plan.cluster),
        "workload": asdict(plan.workload),
        "layout": layout_to_json(plan.layout),
        "predicted": _predicted(plan.predicted, plan.cluster),
        "stages": [asdict(stage) for stage in plan.stages],
        "reasons": list(plan.reasons),
    }


def scaling_json(points: Sequence[ScalingPoint], params: int, budget: TokenBudget | None = None) -> dict[str, Any]:
    """Return the best layout on each cluster; a cluster on which no legal layout fits has the field `gpus` only.

    With a budget each has `run`; with a time in it, `fewest_gpus` is the smallest cluster that meets it, or None.
    """
    rows = [{"gpus": str(p.cluster), **(_best(p.cluster, p.best, params) if p.best else {})} for p in points]
    result: dict[str, Any] = {"version": JSON_VERSION, "points": rows}
    if budget is None:
        return result
    costs = costs_of_points(points, params, budget)
    for row, cost in zip(rows, costs, strict=True):
        row |= {} if cost is None else {"run": cost_json(cost, budget)}
    if budget.within_seconds is not None:
        best = fewest_devices(costs, budget)
        result["fewest_gpus"] = None if best is None else str(best.cluster)
    return result


def _best(cluster: Cluster, best: Priced, params: int) -> dict[str, Any]:
    workload = best.partition.problem.job.workload
    estimate = goodput(params, workload.precision, cluster, best.seconds)
    return {
        "workload": asdict(workload),
        "layout": layout_to_json(best.layout),
        "predicted": _predicted(best.prediction, cluster),
        "goodput": None if estimate is None else asdict(estimate),
    }


def _predicted(p: Prediction, cluster: Cluster) -> dict[str, Any]:
    calibration = cluster.calibration
    return {
        **({"calibration": asdict(calibration)} if calibration else {}),
        "step_seconds": p.step_seconds,
        "step_seconds_low": p.interval[0],
        "step_seconds_high": p.interval[1],
        "memory_gib": peak_nbytes(p) / GiB,
        "memory_gib_high": None if p.nbytes_high is None else p.nbytes_high / GiB,
        "memory_overflow_chance": p.overflow,
        "tokens_per_second_per_gpu": p.tokens_per_second_per_device,
        "tflops_per_gpu": p.flops_per_second_per_device / 1e12,
        "mfu": p.mfu,
        "bubble": p.bubble,
        "exposed_communication": exposed_communication(p),
        "breakdown_seconds": p.breakdown,
        "peak_moment_by_rank": list(p.moments),
        "memory_gib_by_rank": [{holder: n / GiB for holder, n in rank.items()} for rank in p.nbytes],
    }
