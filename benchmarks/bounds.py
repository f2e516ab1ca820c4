"""Gain of each lower bound: `python benchmarks/bounds.py [NAME ...]`, minutes.

Each bound is replaced in turn by a weaker one that costs nothing. Printed are the layouts that the search then
partitions and simulates, and its processor time, as multiples of the complete search. The best plan must stay.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from time import process_time
from typing import Any
from unittest.mock import patch

import numpy as np
from attrs import evolve, frozen

from megaloom.dsl.catalog import find
from megaloom.planner import Precision, Workload, cluster, plan
from megaloom.planner.bounds import base_costs, interleaved_memory, lower_bounds, pipeline
from megaloom.planner.bounds.balanced_partition import BalancedBounds, balanced_bounds
from megaloom.planner.bounds.pipeline import pass_multiples
from megaloom.planner.search import best_first, candidates, pricing
from megaloom.planner.search.pricing import Pricer

SEARCHES = (
    ("llama3-8b", "8xH100", Workload(seq=8192, batch=64)),
    ("mixtral-8x7b", "128xH100", Workload(seq=4096, batch=1024)),
    ("deepseek-v3", "512xH100", Workload(seq=4096, batch=4096)),
    ("gpt2", "4xCPU", Workload(seq=256, batch=32, precision=Precision.FP32)),
    ("llama3-70b", "512xH100", Workload(seq=8192, batch=512)),
    ("gpt3-175b", "1024xH100", Workload(seq=2048, batch=1536)),
    ("gpt-oss-120b", "256xH100", Workload(seq=4096, batch=1024)),
    ("t5-11b", "64xH100", Workload(seq=512, batch=2048)),
    ("deepseek-v3", "2048xH100", Workload(seq=4096, batch=15360)),
    ("deepseek-v3", "16384xH100", Workload(seq=4096, batch=15360)),
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

    def weaker(balance: Any, bounds: Any, bounded: Any) -> BalancedBounds:
        whole = balanced_bounds(balance, bounds, bounded)
        plain = {"seconds": bounded.seconds, "expected_seconds": whole.seconds, "nbytes": bounded.nbytes}
        return evolve(whole, **{name: plain[name]})

    return weaker


REMOVALS = {
    "large_batch_seconds": Removal(candidates, "large_batch_seconds", lambda base, _: np.zeros(len(base))),
    "interleaved_multiples": Removal(pipeline, "pass_multiples", _mean_passes),
    "pass_multiples, 1F1B": Removal(pipeline, "pass_multiples", _mean_of_one_chunk),
    "first_backward_multiple": Removal(pipeline, "first_backward_multiple", lambda pp, *_: np.ones(len(pp))),
    "end_of_step_bound": Removal(lower_bounds, "end_of_step_bound", lambda x, *_: np.zeros((len(x), 2))),
    "sends": Removal(base_costs, "_send_seconds", lambda base, _: np.zeros(len(base))),
    "interleaved_nbytes": Removal(interleaved_memory, "interleaved_nbytes", lambda state, *_: np.zeros(len(state))),
    "balanced seconds": Removal(best_first.balanced_partition, "balanced_bounds", _balanced("seconds")),
    "expected seconds": Removal(best_first.balanced_partition, "balanced_bounds", _balanced("expected_seconds")),
    "balanced bytes": Removal(best_first.balanced_partition, "balanced_bounds", _balanced("nbytes")),
    "capped stages": Removal(best_first.balanced_partition, "balanced_bounds", _balanced("least_nbytes")),
    "step_lower_bound": Removal(pricing, "step_lower_bound", lambda partition: 0.0),
}


def counted(counts: Counter[str], name: str) -> Any:
    """Return a patch of a method of `Pricer` that counts its calls."""
    method = getattr(Pricer, name)

    def counting(*args: Any) -> Any:
        counts[name] += 1
        return method(*args)

    return patch.object(Pricer, name, counting)


def searched(name: str, machine: str, work: Workload) -> tuple[Counter[str], float]:
    """Return what a search counted, with its processor time in milliseconds, and the step time of its best plan."""
    counts: Counter[str] = Counter()
    with counted(counts, "refined"), counted(counts, "simulate"):
        start = process_time()
        result = plan(find(name)[0], cluster(machine), work, ref="benchmark")
        counts["milliseconds"] = round(1e3 * (process_time() - start))
    return counts, result.best.predicted.step_seconds


def main() -> None:
    whole = {}
    for case in SEARCHES:
        whole[case] = searched(*case)
        print(f"{'complete':<26}{case[0]:<14}{case[1]:<12}{dict(whole[case][0])}", flush=True)
    for name in sys.argv[1:] or REMOVALS:
        removal = REMOVALS[name]
        with patch.object(removal.owner, removal.name, removal.weaker):
            for case in SEARCHES:
                counts, step = searched(*case)
                complete, best = whole[case]
                ratios = "  ".join(f"{key} {counts[key] / n:.2f}" for key, n in complete.items())
                other = "" if abs(step / best - 1) < 1e-9 else "  another plan"
                print(f"{name:<26}{case[0]:<14}{case[1]:<12}{ratios}{other}", flush=True)


if __name__ == "__main__":
    main()
