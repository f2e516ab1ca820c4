"""Gain of each lower bound and cache: `python benchmarks/bounds.py [NAME ...]`, half an hour.

Each bound is replaced in turn by a weaker one that costs nothing, and each cache by none. Printed are the processor
seconds of a search without it, the layouts that it then refines (partitions within the memory limit) and simulates, and
the node costs that it computes, as multiples of the complete search. The best plan must stay. The last table has the
seconds of all searches together: what saves less than a tenth of them is not worth its code.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from time import process_time
from typing import Any
from unittest.mock import patch

import numpy as np
from attrs import evolve, frozen

from megaloom.dsl.catalog import find
from megaloom.planner import Precision, Workload, cluster, plan
from megaloom.planner.bounds import balanced_partition, base_costs, interleaved_memory, lower_bounds, pipeline, time_cap
from megaloom.planner.bounds.balanced_partition import BalancedBounds, balanced_bounds
from megaloom.planner.bounds.lower_bounds import LowerBounds
from megaloom.planner.bounds.pipeline import pass_multiples
from megaloom.planner.bounds.time_cap import CappedBounds, capped_bounds
from megaloom.planner.contract.layout import Layout
from megaloom.planner.cost import cost_cache
from megaloom.planner.cost.cost_table import CostTable, cost_table
from megaloom.planner.partition.chain_costs import SECONDS
from megaloom.planner.search import best_first, candidates, pricing
from megaloom.planner.search.pricing import Pricer

SEARCHES = (
    ("llama3-8b", "8xH100", Workload(seq=8192, batch=64)),
    ("mixtral-8x7b", "128xH100", Workload(seq=4096, batch=1024)),
    ("deepseek-v3", "512xH100", Workload(seq=4096, batch=4096)),
    ("gpt2", "4xCPU", Workload(seq=256, batch=32, precision=Precision.FP32)),
    ("t5-11b", "64xH100", Workload(seq=512, batch=2048)),
    ("deepseek-v3", "2048xH100", Workload(seq=4096, batch=15360)),
)


@frozen
class Removal:
    """A function of a module or class, and the weaker one that replaces it."""

    owner: Any
    name: str
    weaker: Callable[..., Any]


def _mean_passes(pp: Any, vpp: Any, m: Any, group: Any) -> Any:
    return m / pp, np.zeros(len(pp))


def _mean_of_one_chunk(pp: Any, vpp: Any, m: Any, group: Any) -> Any:
    passes, sends = pass_multiples(pp, vpp, m, group)
    return np.where(vpp == 1, m / pp, passes), sends


def _balanced(name: str) -> Callable[..., BalancedBounds]:
    """Return `balanced_bounds` without one of its columns."""

    def weaker(balance: Any, bounds: Any, chained: Any, through: Any) -> BalancedBounds:
        whole = balanced_bounds(balance, bounds, chained, through)
        plain = {"expected_seconds": whole.seconds, "nbytes": chained.bounded.nbytes}
        return evolve(whole, **{name: plain[name]})

    return weaker


def _not_capped(example: Any, bounds: Any, chained: Any) -> CappedBounds:
    """Return `capped_bounds` without the bytes."""
    return evolve(capped_bounds(example, bounds, chained), nbytes=chained.bounded.nbytes)


def _without_recompute(costs: Any, which: Any, *cap: Any, within_cap: Any = time_cap._within_cap) -> Any:
    """Return what `_within_cap` does, with the seconds of a micro-batch without recompute of first blocks."""
    return costs.before[SECONDS, costs.table[which], -1], *within_cap(costs, which, *cap)[1:]


def _new_table(pricer: Pricer, layout: Layout) -> CostTable:
    """Return a cost table, without looking for one that is known."""
    cache = pricer.cost_cache
    return cost_table(cache.job, layout, cache.bare_table(layout))


REMOVALS = {
    "large_batch_seconds": Removal(candidates, "large_batch_seconds", lambda base, _: np.zeros(len(base))),
    "interleaved_multiples": Removal(pipeline, "pass_multiples", _mean_passes),
    "pass_multiples, 1F1B": Removal(pipeline, "pass_multiples", _mean_of_one_chunk),
    "end_of_step_bound": Removal(lower_bounds, "end_of_step_bound", lambda x, *_: np.zeros((len(x), 2))),
    "sends": Removal(base_costs, "_send_seconds", lambda base, _: np.zeros(len(base))),
    "interleaved_nbytes": Removal(interleaved_memory, "interleaved_nbytes", lambda state, *_: np.zeros(len(state))),
    "base layouts in 1F1B": Removal(lower_bounds, "_may_interleave", lambda base, _: base.pp > 1),
    "recompute within the time cap": Removal(time_cap, "_within_cap", _without_recompute),
    "waiting for sharded weights": Removal(balanced_partition, "_waiting_seconds", lambda x, *_: np.zeros(len(x))),
    "gathers of sharded weights": Removal(LowerBounds, "_gathering_seconds", lambda _, x, __: np.zeros(len(x))),
    "expected seconds": Removal(best_first, "balanced_bounds", _balanced("expected_seconds")),
    "balanced bytes": Removal(best_first, "balanced_bounds", _balanced("nbytes")),
    "capped stages": Removal(best_first, "capped_bounds", _not_capped),
    "one_stage_seconds": Removal(best_first, "one_stage_seconds", lambda _, chained, __: chained.bounded.seconds),
    "step_lower_bound": Removal(pricing, "step_lower_bound", lambda partition: 0.0),
    "cache of cost tables": Removal(Pricer, "cost_table", _new_table),
    "cache of balanced partitions": Removal(Pricer, "_balance", lambda _, problem: problem.balanced),
}


def counted(counts: Counter[str], owner: Any, name: str) -> Any:
    """Return a patch of a function of a class or module that counts its calls."""
    function = getattr(owner, name)

    def counting(*args: Any, **options: Any) -> Any:
        counts[name] += 1
        return function(*args, **options)

    return patch.object(owner, name, counting)


def searched(name: str, machine: str, work: Workload) -> tuple[Counter[str], float, float]:
    """Return what a search counted, the step time of its best plan, and its processor seconds."""
    counts: Counter[str] = Counter()
    with ExitStack() as patches:
        for owner, function in ((Pricer, "refined"), (Pricer, "simulate"), (cost_cache, "node_cost")):
            patches.enter_context(counted(counts, owner, function))
        began = process_time()
        found = plan(find(name)[0], cluster(machine), work, ref="benchmark")
        return counts, found.best.predicted.step_seconds, process_time() - began


def without(removal: Removal, case: tuple[str, str, Workload]) -> tuple[Counter[str], float, float]:
    """Return what a search counts without one bound or cache, its best step time, and its processor seconds."""
    with patch.object(removal.owner, removal.name, removal.weaker):
        return searched(*case)


def multiples(now: Counter[str], complete: Counter[str]) -> str:
    """Return the counts of a search as multiples of those of the complete search."""
    return "  ".join(f"{key} {now[key] / max(1, complete[key]):.2f}" for key in ("refined", "simulate", "node_cost"))


def main() -> None:
    names, total = sys.argv[1:] or [*REMOVALS], defaultdict[str, float](float)
    for case in SEARCHES:
        counts, best, took = searched(*case)
        runs = [(name, *without(REMOVALS[name], case)) for name in names]
        took = min(took, searched(*case)[-1])
        total["complete"] += took
        print(f"{case[0]} on {case[1]}: {took:.2f} s, {counts['refined']} layouts refined", flush=True)
        for name, less, step, seconds in runs:
            total[name] += seconds
            other = "" if abs(step / best - 1) < 1e-9 else "  another plan"
            print(f"  {name:<30}seconds {seconds / took:.2f}  {multiples(less, counts)}{other}", flush=True)
    print("all searches")
    for name in names:
        print(f"  {name:<30}seconds {total[name] / total['complete']:.2f}")


if __name__ == "__main__":
    main()
