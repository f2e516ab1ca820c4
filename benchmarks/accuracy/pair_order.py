"""Order of two layouts: how often the one that is predicted to be faster was measured to be."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from math import inf

from attrs import frozen

from .scoring import Predicted

LIMITS = (0.01, 0.02, 0.05, 0.1, 0.2, inf)  # upper ends of the classes of predicted differences


@frozen
class PairClass:
    """Pairs of layouts of one sweep whose predicted step times differ by more than `above` and at most `limit`."""

    above: float
    limit: float
    pairs: int
    right: int  # pairs in the measured order


def pair_classes(rows: Iterable[Predicted]) -> list[PairClass]:
    """Return the pairs of different layouts of each sweep by their predicted difference, longer step / shorter - 1."""
    counts = [[0, 0] for _ in LIMITS]
    for sweep in _sweeps(rows):
        for a, b in combinations(sweep, 2):
            measured = a.training_run.step_seconds or 0.0, b.training_run.step_seconds or 0.0
            if a.training_run.layout == b.training_run.layout or measured[0] == measured[1]:
                continue
            shorter, longer = sorted((a.step_seconds, b.step_seconds))
            count = counts[bisect_left(LIMITS, longer / shorter - 1)]
            count[0] += 1
            count[1] += (a.step_seconds < b.step_seconds) == (measured[0] < measured[1])
    bounds = zip((0.0, *LIMITS), LIMITS, counts, strict=False)
    return [PairClass(above, limit, pairs, right) for above, limit, (pairs, right) in bounds]


def _sweeps(rows: Iterable[Predicted]) -> Iterable[Sequence[Predicted]]:
    sweeps: dict[str, list[Predicted]] = defaultdict(list)
    for row in rows:
        if row.training_run.sweep and row.training_run.step_seconds is not None:
            sweeps[row.training_run.sweep].append(row)
    return sweeps.values()
