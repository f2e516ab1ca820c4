"""Cutting a chain into chunks: exact, by dynamic programming.

Protocol: a model is a chain of atoms, what lies between two neighbouring cuts of its graph. `cut` says where each chunk
begins; `evenest` is the whole problem on plain numbers, `latest` its memory limit; `evens` solves it for many chains at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .memory_limit import SAME
from .segments import (
    ChainBatch,
    Indices,
    SegmentSums,
    Vector,
)

Latest = Callable[[int], Indices]
WIDER = 2.0  # times the slowest run that is looked at, until there is a way
AT_ONCE = 1 << 18  # runs that are looked at together, of all chains
HALVINGS = 100  # of what the slowest run may take: each leaves out at least one run


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


def evenest(atoms: Vector | SegmentSums, count: int, latest: Latest | None = None) -> tuple[int, ...] | None:
    """The bounds of `count` non-empty runs of atoms whose slowest run is as quick as can be.

    `atoms` are the seconds of each, or those of runs of them. Among the ways the least sum of squares, so that what is
    not slowest is even too. `latest(k)[i]` is where run k must end if it begins at atom i. None if there is no way.
    """
    runs = atoms if isinstance(atoms, SegmentSums) else SegmentSums.of(atoms)
    if count > len(runs):
        return None
    if latest is None:
        return _bounds(evens(ChainBatch.of([runs]), count))
    ends = np.array([latest(k) for k in range(count)])
    return None if _short(ends) else _bounds(_evens(ChainBatch.of([runs]), count, ends))


def evens(chains: ChainBatch, count: int) -> Indices:
    """The same of each chain when nothing limits its runs: [chains, count + 1]. There must be as many atoms."""
    if count == 1:
        return np.tile([0, chains.size], (len(chains), 1))
    if chains.runs.more is None:
        return _least(chains, count, slowest(chains, count))
    return _evens(chains, count)


def _evens(chains: ChainBatch, count: int, ends: Indices | None = None) -> Indices:
    """The same where a run's first atoms take more, or runs have to end; a row of -1 where there is no way."""
    limits, atoms = slowest(chains, count), _atoms(chains)
    whole = atoms.sum(axis=1)  # a run takes no more than its atoms, each by itself
    found = np.full((len(chains), count + 1), -1)
    todo = np.arange(len(chains))
    while len(todo):
        found[todo] = _least(chains.take(todo), count, limits[todo], ends, even=False)
        todo = todo[(found[todo, 0] < 0) & (limits[todo] < whole[todo])]
        limits[todo] *= WIDER
    done = np.flatnonzero(found[:, 0] >= 0)
    if not len(done):
        return found
    some = chains.take(done)
    cuts = found[done] + some.start[:, None]
    found[done] = _least(some, count, some.runs(cuts[:, :-1], cuts[:, 1:]).max(axis=1), ends)
    return found


def _bounds(cuts: Indices) -> tuple[int, ...] | None:
    return None if cuts[0, 0] < 0 else tuple(cuts[0].tolist())


def _atoms(chains: ChainBatch) -> Vector:
    """The seconds of each atom by itself: [chains, atoms]."""
    here = chains.start[:, None] + np.arange(chains.size)
    atoms: Vector = chains.runs(here, here + 1)
    return atoms


def slowest(chains: ChainBatch, count: int) -> Vector:
    """The seconds of the slowest of so many runs or fewer, when it is as quick as can be and nothing limits them.

    Where a run's first atoms take more, as many may take longer. Between what is too little and what is enough the
    middle is tried: runs take all that they may; what they take is enough, or the least that one of them lacks to take
    an atom more is what is asked for at the least.
    """
    atoms, last = _atoms(chains), chains.start + chains.size
    longest = atoms.max(axis=1)
    least: Vector = np.maximum(chains.runs(chains.start, last) / count, longest)
    most: Vector = atoms.sum(axis=1) / count + longest  # runs of the average, and an atom
    tried = least.copy()
    for _ in range(HALVINGS):
        far = (chains.far(tried * SAME) + chains.start[:, None]).ravel()
        cuts = [chains.start]
        for _ in range(count):
            cuts.append(far[cuts[-1]])
        ends = np.array(cuts)
        enough = ends[-1] == last
        taken = chains.runs(ends[:-1], ends[1:]).max(axis=0)
        more = chains.runs(ends[:-1], np.minimum(ends[1:] + 1, last))
        lacking = np.where(ends[1:] < last, more, np.inf).min(axis=0)
        most = np.where(enough, np.minimum(most, taken), most)
        least = np.where(enough, least, np.maximum(least, lacking))
        if (least * SAME >= most).all():
            break
        tried = np.where(least * SAME >= most, most, (least + most) / 2)
    return most


def within(runs: SegmentSums, ends: Indices, slowest: float) -> tuple[int, ...] | None:
    """The most even bounds of runs no slower than this, which end where they may, [runs, atoms]: see `evenest`."""
    return None if _short(ends) else _bounds(_least(ChainBatch.of([runs]), len(ends), np.array([slowest]), ends))


def _short(ends: Indices) -> bool:
    """Whether runs that end no later than this cannot reach the end, even if some were empty."""
    size, done = len(ends[0]), 0
    for end in ends:
        done = max(done, int(end[: done + 1].max()))
        if done == size:
            return False
    return True


def _least(
    chains: ChainBatch, count: int, limits: Vector, ends: Indices | None = None, *, even: bool = True
) -> Indices:
    """The bounds of runs no slower than the limit of their chain: the most even, or the quickest.

    The most even have the least sum of squares, the quickest the least maximum. A row of -1 where there is no way.
    ends: [count, atoms], where runs have to end.
    """
    far = chains.far(limits * SAME)
    first, last = _reach(np.maximum.accumulate(far, axis=1), count)
    out = np.full((len(chains), count + 1), -1)
    window = np.maximum(1, (far - np.arange(chains.size + 1)).max(axis=1))  # atoms of a run, at the most
    todo = np.flatnonzero((first <= last).all(axis=1))
    todo = todo[np.argsort(window[todo], kind="stable")]
    while len(todo):
        n = max(1, AT_ONCE // ((chains.size + 1) * int(window[todo].max())))
        some, todo = todo[-n:], todo[:-n]
        band = list(zip(first[some].min(axis=0).tolist(), (last[some].max(axis=0) + 1).tolist(), strict=True))
        out[some] = _solved(chains.take(some), far[some], int(window[some].max()), band, ends, even)
    return out


def _reach(far: Indices, count: int) -> tuple[Indices, Indices]:
    """The first and the last place of each bound of so many runs, none empty: [chains, count + 1].

    far: where the longest run from each place ends, or from one before it: [chains, places].
    """
    rows, size = np.arange(len(far)), far.shape[1] - 1
    base = rows * (size + 1)
    flat = (far + base[:, None]).ravel()
    nearest = flat.searchsorted(np.arange(len(flat))) - np.repeat(base, size + 1)
    last, first = [np.zeros(len(far), dtype=np.intp)], [np.full(len(far), size)]
    for k in range(1, count + 1):
        last.append(np.minimum(far[rows, last[-1]], size - count + k))
        first.append(np.maximum(nearest[base + first[-1]], count - k))
    return np.array(first[::-1]).T, np.array(last).T


def _solved(
    chains: ChainBatch, far: Indices, most: int, band: Sequence[tuple[int, int]], ends: Indices | None, even: bool
) -> Indices:
    """`_least` of chains whose runs have so many atoms at the most; each bound is within a band of places."""
    here = np.arange(chains.size + 1)
    start = here[:, None] - np.arange(most, 0, -1)  # [ends, runs]: quick along the last axis
    inside, start = (start >= 0) & (here[:, None] <= far[:, np.maximum(start, 0)]), np.maximum(start, 0)
    base = chains.start[:, None, None]
    seconds = chains.runs(start + base, np.broadcast_to(here[:, None] + base, inside.shape))
    cost = np.where(inside, seconds**2 if even else seconds, np.inf)
    # By bound and by place, behind as many as a run has atoms; before: by end, where runs that end there may begin.
    best = np.full((len(band), len(chains), most + chains.size + 1), np.inf)
    before, best[0, :, most] = sliding_window_view(best, most, axis=2), 0.0
    back = []
    for k, (first, last) in enumerate(band[1:]):
        came, step = before[k, :, first:last], cost[:, first:last]
        reach = came + step if even else np.maximum(came, step)
        if ends is not None:
            reach = np.where(here[first:last, None] <= ends[k][start[first:last]], reach, np.inf)
        back.append(reach.argmin(axis=2))
        reach.min(axis=2, out=best[k + 1, :, first + most : last + most])
    out = np.full((len(chains), len(band)), -1)
    found = np.flatnonzero(np.isfinite(best[-1, :, -1]))
    out[found, -1] = chains.size
    for k in reversed(range(len(back))):
        end = out[found, k + 1]
        out[found, k] = end - most + back[k][found, end - band[k + 1][0]]
    return out
