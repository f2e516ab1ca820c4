"""Cutting a chain into chunks: exact, by dynamic programming.

Protocol: a model is a chain of atoms, what lies between two neighbouring cuts of its graph. `cut` says where each chunk
begins; `evenest` is the whole problem on plain numbers, `latest` its memory limit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Places = NDArray[np.intp]
Latest = Callable[[int], Places]
SAME = 1 + 1e-12  # sums of the same seconds in another order
WIDER = 2.0  # times the slowest run that is looked at, until there is a way


def cut(
    seconds: Sequence[float] | Vector, cuts: Sequence[int], count: int, latest: Latest | None = None
) -> tuple[int, ...] | None:
    """The positions 0, …, len(seconds) that bound `count` chunks of nodes, none empty, each begun at one of `cuts`.

    `seconds` are by node. None if there are too few cuts, or `latest` leaves no way.
    """
    places = (0, *cuts, len(seconds))
    sums = np.add.reduceat(np.asarray(seconds, dtype=float), places[:-1])
    chosen = evenest(sums, count, latest)
    return None if chosen is None else tuple(places[i] for i in chosen)


def evenest(atoms: Vector, count: int, latest: Latest | None = None) -> tuple[int, ...] | None:
    """The bounds of `count` non-empty runs of atoms whose slowest run is as quick as can be.

    Among those, the least sum of squares, so that what is not slowest is even too. `latest(k)[i]` is where run k must
    end if it begins at atom i: no earlier than if it began earlier. None if there is no way.
    O(count · len(atoms) · atoms in the longest run), in numpy.
    """
    size = len(atoms)
    if count > size:
        return None
    if count == 1 and latest is None:
        return (0, size)
    ends = [np.full(size, size) if latest is None else latest(k) for k in range(count)]
    if _short(ends):
        return None
    sums = np.concatenate([[0.0], np.cumsum(atoms)])
    slowest = _slowest(sums, count)
    if latest is None:
        return _least(sums, ends, slowest, _total)
    while (bounds := _least(sums, ends, slowest, np.maximum)) is None:
        if slowest >= sums[-1]:
            return None
        slowest *= WIDER
    return _least(sums, ends, float(np.diff(sums[list(bounds)]).max()), _total)


def _slowest(sums: Vector, count: int) -> float:
    """The seconds of the slowest of so many runs, when it is as quick as can be and nothing limits them."""
    size = len(sums) - 1

    def feasible(seconds: float) -> bool:
        """Whether runs no slower than this reach the end, when each takes all that it may."""
        far = (np.searchsorted(sums, sums + seconds * SAME, side="right") - 1).tolist()
        done = 0
        for _ in range(count):
            done = far[done]
        return bool(done == size)

    seconds = np.unique(np.maximum(sums[:, None] - sums, 0.0))
    return float(seconds[bisect_left(seconds, True, key=feasible)])


def _short(ends: Sequence[Places]) -> bool:
    """Whether runs that end no later than this cannot reach the end, even if some were empty."""
    size, done = len(ends[0]), 0
    for end in ends:
        done = max(done, int(end[done]))
        if done == size:
            return False
    return True


def _total(before: Vector, seconds: Vector) -> Vector:
    return before + seconds**2


def _least(
    sums: Vector, ends: Sequence[Places], slowest: float, join: Callable[[Vector, Vector], Vector]
) -> tuple[int, ...] | None:
    """The bounds of runs no slower than this, ending where they may, whose seconds come to the least when joined."""
    far = np.searchsorted(sums, sums + slowest * SAME, side="right") - 1
    here = np.arange(len(sums))
    window = np.arange((far - here).max(), 0, -1)  # [atoms of a run that ends here]: numpy is quick along the last axis
    start = here[:, None] - window
    outside = (start < 0) | (here[:, None] > far[start])
    start = np.maximum(start, 0)
    seconds = np.where(outside, np.inf, sums[:, None] - sums[start])
    best, back = np.where(here == 0, 0.0, np.inf), []
    for end in ends:
        reach = np.where(here[:, None] <= end[start], join(best[start], seconds), np.inf)
        choice = reach.argmin(axis=1)
        back.append(start[here, choice])
        best = reach[here, choice]
    if not np.isfinite(best[-1]):
        return None
    bounds = [len(sums) - 1]
    for began in reversed(back):
        bounds.append(int(began[bounds[-1]]))
    return tuple(reversed(bounds))
