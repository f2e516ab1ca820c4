"""Lower bound of the peak memory of the fullest pipeline rank, for every partition."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from megaloom.planner.contract.layouts import Rows
from megaloom.planner.cost.memory import rank_memory


@lru_cache(maxsize=1 << 14)
def in_flight_means(pp: int, interleaved: bool, group: int, microbatches: int) -> tuple[float, float, float]:
    """Return min f[r], min 1 / f[r] and sum of 1 / f[r] over the ranks r of a schedule.

    f[r] counts the micro-batches in flight of rank r's last chunk before its first backward pass. At least one is, and
    no chunk of the rank has fewer.
    """
    later = [pp - 1 - r for r in range(pp)]
    in_flight = [min(2 * n + 1, group) if interleaved else min(n + 1, microbatches) for n in later]
    return min(in_flight), min(1 / f for f in in_flight), sum(1 / f for f in in_flight)


def least_rank_memory(state: Rows, saved: Rows, pp: Rows, in_flight: tuple[Rows, Rows, Rows]) -> Rows:
    """Return a lower bound of the fullest rank's bytes, without transient bytes: one entry for each layout.

    Let S and A be the state and the saved activations of the whole model, and a of `rank_memory`. Rank r has s[r] + a
    f[r] a[r], with sum s[r] = S and sum a[r] = A. The largest rank is at least any weighted mean. Equal weights give
    (S + a min f A) / pp; weights 1 / f[r] give (min 1/f S + a A) / sum 1/f. in_flight: see `in_flight_means`.
    """
    fewest, inverse, total = in_flight
    equal, weighted = (
        rank_memory(state / pp, saved / pp, fewest, 0.0),
        rank_memory(inverse * state / total, saved / total, 1.0, 0.0),
    )
    return np.maximum(equal, weighted)
