"""Cutting a chain into chunks: exact, by dynamic programming.

Protocol: a model is a chain of atoms, what lies between two neighbouring cuts of its graph. `cut` says where each chunk
begins; `evenest` is the whole problem on plain numbers, `latest` its memory limit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from .rooms import SAME
from .spans import Places, Spans, Vector

Latest = Callable[[int], Places]
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


def evenest(atoms: Vector | Spans, count: int, latest: Latest | None = None) -> tuple[int, ...] | None:
    """The bounds of `count` non-empty runs of atoms whose slowest run is as quick as can be.

    `atoms` are the seconds of each, or those of runs of them. Among the ways the least sum of squares, so that what is
    not slowest is even too. `latest(k)[i]` is where run k must end if it begins at atom i. None if there is no way.
    O(count · len(atoms) · atoms in the longest run), in numpy.
    """
    runs = atoms if isinstance(atoms, Spans) else Spans.of(atoms)
    size = len(runs)
    if count > size:
        return None
    if count == 1 and latest is None:
        return (0, size)
    ends = [np.full(size, size) if latest is None else latest(k) for k in range(count)]
    if _short(ends):
        return None
    slowest = _slowest(runs, count)
    if latest is None and runs.more is None:
        return _least(runs, ends, slowest)
    here = np.arange(size)
    whole = float(runs(here, here + 1).sum())  # a run takes no more than its atoms, each by itself
    while (bounds := _least(runs, ends, slowest, even=False)) is None:
        if slowest >= whole:
            return None
        slowest *= WIDER
    return _least(runs, ends, float(runs(np.array(bounds[:-1]), np.array(bounds[1:])).max()))


def quickest(runs: Spans, count: int) -> float:
    """The seconds of the slowest of so many runs, when it is as quick as can be: what `evenest` has, sooner."""
    if runs.more is None:
        return _slowest(runs, count)
    bounds = evenest(runs, count)
    assert bounds is not None, "more runs than atoms"
    return float(runs(np.array(bounds[:-1]), np.array(bounds[1:])).max())


def _slowest(runs: Spans, count: int) -> float:
    """The seconds of the slowest of so many runs or fewer, when it is as quick as can be and nothing limits them.

    Where a run's first atoms take more, as many may take longer.
    """
    size, here = len(runs), np.arange(len(runs))

    def feasible(seconds: float) -> bool:
        """Whether runs no slower than this reach the end, when each takes all that it may."""
        far = runs.far(seconds * SAME).tolist()
        done = 0
        for _ in range(count):
            done = far[done]
        return bool(done == size)

    atoms = runs(here, here + 1)
    longest = float(atoms.max())
    whole = float(runs(here[:1], here[:1] + size)[0])
    least, most = max(whole / count, longest), float(atoms.sum()) / count + longest  # runs of the average, and an atom
    first, last = runs.far(least / SAME**2)[:-1], runs.far(most * SAME)[:-1]
    ends = first[:, None] + np.arange(int((last - first).max()) + 2)
    inside = (ends > here[:, None]) & (ends <= np.minimum(last + 1, size)[:, None])
    seconds = np.sort(runs(np.broadcast_to(here[:, None], ends.shape)[inside], ends[inside]))
    return float(seconds[bisect_left(seconds, True, key=feasible)])


def within(runs: Spans, ends: Sequence[Places], slowest: float) -> tuple[int, ...] | None:
    """The most even bounds of runs no slower than this, which end where they may: see `evenest`."""
    return None if _short(ends) else _least(runs, ends, slowest)


def _short(ends: Sequence[Places]) -> bool:
    """Whether runs that end no later than this cannot reach the end, even if some were empty."""
    size, done = len(ends[0]), 0
    for end in ends:
        done = max(done, int(end[: done + 1].max()))
        if done == size:
            return False
    return True


def _least(runs: Spans, ends: Sequence[Places], slowest: float, *, even: bool = True) -> tuple[int, ...] | None:
    """The bounds of runs no slower than this, ending where they may: the most even, or the quickest.

    The most even have the least sum of squares, the quickest the least maximum.
    """
    far = runs.far(slowest * SAME)
    here = np.arange(len(runs) + 1)
    window = np.arange(max(1, (far - here).max()), 0, -1)  # atoms of a run that ends here: quick along the last axis
    start = here[:, None] - window
    outside = (start < 0) | (here[:, None] > far[start])
    start = np.maximum(start, 0)
    seconds = np.where(outside, np.inf, runs(start, np.broadcast_to(here[:, None], start.shape)))
    cost = seconds**2 if even else seconds
    best, back = np.where(here == 0, 0.0, np.inf), []
    for end in ends:
        reach = best[start] + cost if even else np.maximum(best[start], cost)
        if end.min() < len(here) - 1:
            reach = np.where(here[:, None] <= end[start], reach, np.inf)
        choice = reach.argmin(axis=1)
        back.append(start[here, choice])
        best = reach[here, choice]
    if not np.isfinite(best[-1]):
        return None
    bounds = [len(runs)]
    for began in reversed(back):
        bounds.append(int(began[bounds[-1]]))
    return tuple(reversed(bounds))
