"""Cuts into several chunks a rank: what a rank's chunks take together counts, so that no run can be cut by itself.

Protocol: `settled` moves atoms between the runs of a cut as long as a score gets less; `level` scores the seconds of
interleaved chunks; `joint` is the cut with the quickest slowest run of those whose ranks have room for their chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import combinations
from math import comb, inf

import numpy as np
from numpy.typing import NDArray

from .dynamic_program import within
from .memory_limit import SAME, MemoryLimit, Rows
from .segments import Indices, SegmentSums, Vector

Score = Callable[[Indices], Vector]  # of cuts [ways, bounds]: the less, the better
Losers = Callable[[Indices], Indices]  # the numbers of runs of a cut
WAYS = 1000  # to cut: so many are simply all looked at
FOLDS = 5  # a mean of 2^5-th powers is near the maximum, and falls when any of the largest does
SLOWEST_FACTOR = 1.5  # of chunks that must fit the memory: as many times as slow as those that need not, at the most
LONGEST = 48  # runs of a cut that is worth looking at shift by shift: of more each has an atom or two
LITTLE = 0.1  # of its room that a rank may lack on average, to be looked at shift by shift: of more hardly any is saved


def descend(bounds: Indices, score: Score, losers: Losers) -> Indices:
    """The cut that is reached from this one by the best shift of all, again and again, until none makes it better.

    A shift moves one or two atoms from a run to another, and those between along. losers: which runs may lose some.
    """
    least = float(score(bounds[None])[0]) if len(bounds) <= LONGEST + 1 else 0.0
    while least > 0:
        shifts = [_shifts(len(bounds) - 1, run) for run in losers(bounds).tolist()]
        every = bounds[:, None] + np.concatenate(shifts, axis=1)
        ways = every[:, (every[1:] > every[:-1]).all(axis=0)].T
        if not len(ways):
            break
        scores = score(ways)
        best = int(scores.argmin())
        if scores[best] * SAME >= least:
            break
        least, bounds = float(scores[best]), ways[best]
    return bounds


@lru_cache(maxsize=1024)
def _shifts(count: int, loser: int) -> NDArray[np.int8]:
    """By how much each bound moves as one of so many runs loses what another gains: [bounds, shifts]."""
    out = np.zeros((count, 2, count + 1), dtype=np.int8)
    for gains in range(count):
        first, last = sorted((gains, loser))
        out[gains, :, first + 1 : last + 1] = [[1], [2]] if gains < loser else [[-1], [-2]]
    return np.ascontiguousarray(np.delete(out, loser, axis=0).reshape(-1, count + 1).T)


def step_score(seconds: Rows, top: float) -> Vector:
    """How long steps of these chunks take, up to a factor: less is better. [ways, chunks, ranks] -> [ways]

    top: seconds that hardly any takes more than.

    Ranks are one chunk behind each other. What holds up all of them, micro-batch after micro-batch, may stay with the
    rank whose chunks take longest together, or go to whichever is slowest at each chunk: the mean of both. Of the
    cuts with the quickest slowest chunk those that this prefers take 1.6 % less when replayed than those of the least
    sum of squares, over Llama-3-70B, DeepSeek-V3 and Mixtral with 2 to 10 chunks a rank; of the single terms neither
    does.
    """
    peaks = _peak(np.concatenate([seconds.sum(axis=1, keepdims=True), seconds], axis=1) / top)
    long: Vector = top * (peaks[:, 0] + peaks[:, 1:].sum(axis=1))
    return long


def _peak(values: Rows) -> Vector:
    """Nearly the largest along the last axis."""
    power = values.copy()
    for _ in range(FOLDS):
        power *= power
    out: Vector = (power.sum(axis=-1) / power.shape[-1]) ** (1 / 2**FOLDS)
    return out


def level_ranks(runs: SegmentSums, bounds: Indices, ranks: int) -> Indices:
    """A cut that `level` likes better than this one, if shifts lead there: with no slower slowest run."""
    return descend(bounds, _leveling(runs, bounds, ranks), _losers(runs, ranks))


def level_within_limit(runs: SegmentSums, bounds: Indices, rooms: MemoryLimit) -> Indices:
    """The same among cuts with room."""
    near, longer = rooms.near(bounds), _leveling(runs, bounds, rooms.ranks)

    def score(ways: Indices) -> Vector:
        scores = longer(ways)
        quick = np.flatnonzero(scores < inf)
        scores[quick[near.lacks(ways.T[:, quick].T) > 0]] = inf
        return scores

    found = descend(bounds, score, _losers(runs, rooms.ranks))
    return bounds if rooms.lacks(found[None])[0] > 0 else found


def _leveling(runs: SegmentSums, bounds: Indices, ranks: int) -> Score:
    """What `level` says of cuts, of which none may have a slower slowest run than this one."""
    cap = float(runs(bounds[:-1], bounds[1:]).max()) * SAME

    def score(ways: Indices) -> Vector:
        seconds = runs(ways.T[:-1], ways.T[1:])  # [runs, ways]: numpy is quick along the last axis
        scores: Vector = seconds.max(axis=0)
        quick = scores <= cap
        scores[~quick] = inf
        if quick.any():
            scores[quick] = step_score(seconds[:, quick].T.reshape(-1, len(seconds) // ranks, ranks), seconds.max())
        return scores

    return score


def _losers(runs: SegmentSums, ranks: int) -> Losers:
    """The chunks of the rank that takes longest, and the slowest chunk."""

    def losers(bounds: Indices) -> Indices:
        seconds = runs(bounds[:-1], bounds[1:])
        rank = int(seconds.reshape(-1, ranks).sum(axis=0).argmax())
        return np.array(sorted({*range(rank, len(seconds), ranks), int(seconds.argmax())}))

    return losers


def partition_within_limit(runs: SegmentSums, even: Indices, rooms: MemoryLimit) -> Indices | None:
    """The bounds of as many runs as `even` has, whose ranks have room, with a quick slowest run.

    `even` has the quickest slowest run, whatever has room; cuts of which it takes over SLOWEST_FACTOR times as long don't
    count. Of up to WAYS ways it is the best. Of more it is the best if none of its runs takes longer than the slowest
    of `even`; else it is found by shifts, from `even` or from ranks that divide their room evenly among their chunks.
    """
    quickest = float(runs(even[:-1], even[1:]).max()) * SAME
    count, size = len(even) - 1, len(runs)
    if comb(size - 1, count - 1) <= WAYS:
        return _best(runs, _every(size, count), rooms, quickest * SLOWEST_FACTOR)
    if rooms.hopeless(runs, quickest * SLOWEST_FACTOR):
        return None
    near = rooms.near(even)
    little = near.lacks(even[None])[0] <= LITTLE * rooms.ranks
    for cap in (quickest, quickest * SLOWEST_FACTOR) if little else ():
        if cap > quickest or not rooms.hopeless(runs, cap):
            found = _relieved(runs, even, near, cap)
            if rooms.lacks(found[None])[0] <= 0:
                return level_within_limit(runs, _quicker(runs, found, rooms), rooms)
    shared = within(runs, near.shared, quickest * SLOWEST_FACTOR)
    if shared is None or rooms.lacks(found := np.array(shared)[None])[0] > 0:
        return None
    return level_within_limit(runs, _quicker(runs, found[0], rooms), rooms)


def _relieved(runs: SegmentSums, bounds: Indices, rooms: MemoryLimit, cap: float) -> Indices:
    """A cut that lacks less: shift after shift its fullest rank holds less, while no run takes longer than `cap`."""

    def score(ways: Indices) -> Vector:
        scores: Vector = runs(ways.T[:-1], ways.T[1:]).max(axis=0)
        quick = scores <= cap
        scores[~quick], scores[quick] = inf, rooms.lacks(ways.T[:, quick].T)
        return scores

    def losers(bounds: Indices) -> Indices:
        return np.arange(int(rooms.needed(bounds[None])[0].argmax()), len(bounds) - 1, rooms.ranks)

    return descend(bounds, score, losers)


def _quicker(runs: SegmentSums, bounds: Indices, rooms: MemoryLimit) -> Indices:
    """A cut whose slowest run is quicker, and then the next, while its ranks have room."""
    near = rooms.near(bounds)

    def score(ways: Indices) -> Vector:
        return np.where(near.lacks(ways) > 0, inf, _peak(runs(ways[:, :-1], ways[:, 1:])))

    def losers(bounds: Indices) -> Indices:
        return np.array([runs(bounds[:-1], bounds[1:]).argmax()])

    found = descend(bounds, score, losers)
    return bounds if rooms.lacks(found[None])[0] > 0 else found


@lru_cache(maxsize=64)
def _every(size: int, count: int) -> Indices:
    """All ways to cut so many atoms into so many runs."""
    inner = np.array(list(combinations(range(1, size), count - 1)), dtype=np.intp).reshape(-1, count - 1)
    return np.hstack([np.zeros((len(inner), 1), np.intp), inner, np.full((len(inner), 1), size)])


def _best(runs: SegmentSums, ways: Indices, rooms: MemoryLimit, cap: float) -> Indices | None:
    """Of all these ways the one whose slowest run is quickest, and the one that `level` likes among those."""
    seconds = runs(ways[:, :-1], ways[:, 1:])
    slowest = np.where(rooms.lacks(ways) > 0, inf, seconds.max(axis=1))
    if slowest.min() > cap:
        return None
    good = np.flatnonzero(slowest <= slowest.min() * SAME)
    seconds = seconds[good].reshape(len(good), rooms.chunks, rooms.ranks)
    chosen: Indices = ways[good[step_score(seconds, seconds.max()).argmin()]]
    return chosen
