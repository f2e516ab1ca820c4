"""Balanced partition of a chain of segments into stages, exact, by bisection and dynamic programming.

A model is a chain of n segments; t(i, j) are the seconds of a stage from cut point i to cut point j. `SegmentSums`
gives t. `balance` minimises the slowest stage, then the sum of squares; `balance_all` does so for many chains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from attrs import frozen
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

FloatVector = NDArray[np.float64]
FloatMatrix = NDArray[np.float64]
Indices = NDArray[np.intp]
LatestEnds = Callable[[int], Indices]  # the latest end of stage k, for each cut point where it may begin
TOLERANCE = 1 + 1e-12  # tolerance for sums of the same numbers in another order
WIDER = 2.0  # factor on the time cap, until a partition exists under it
AT_ONCE = 1 << 18  # stages that one pass of the dynamic program looks at, of all chains together
HALVINGS = 100  # limit on the steps of the bisection; each excludes at least one stage


@frozen(eq=False)
class SegmentSums:
    """A cost of stages: the sum of their segments, and an extra cost of the first segments of a stage.

    With `extra`, a stage [i, j) adds extra[min(j, e)] - extra[i], where e is the cut point at which the extra of a
    stage from i ends: extra_end[i] is extra there, and last[i] the last cut point at or before it.
    """

    sums: FloatVector  # [cut points] sum of all segments before each cut point
    extra: FloatVector | None = None  # [cut points] sum of the extra cost of all segments before each cut point
    extra_end: FloatVector | None = None  # [cut points]
    last: Indices | None = None  # [cut points]

    @classmethod
    def of(cls, segments: FloatVector) -> SegmentSums:
        """Return the sums of segments without extra cost."""
        return cls(np.concatenate([[0.0], np.cumsum(segments)]))

    @property
    def alone(self) -> ChainBatch:
        """Return the batch of this chain alone."""
        return ChainBatch.of([self])

    def __len__(self) -> int:
        return len(self.sums) - 1

    def __call__(self, start: Indices, end: Indices) -> FloatVector:
        """Return the cost of the stages from these cut points to these."""
        out: FloatVector = self.sums.take(end) - self.sums.take(start)
        if self.extra is not None and self.extra_end is not None and self.last is not None:
            inside = end <= self.last.take(start)
            out = out + np.where(inside, self.extra.take(end), self.extra_end.take(start)) - self.extra.take(start)
        return out

    def farthest(self, limit: float | FloatVector) -> Indices:
        """Return, for a stage that begins at each cut point, its farthest end within the limit (at least its start)."""
        if self.extra is None or self.extra_end is None or self.last is None:
            far = self.sums.searchsorted(self.sums + limit, side="right") - 1
        else:
            with_extra = self.sums + self.extra
            near = np.minimum(with_extra.searchsorted(with_extra + limit, side="right") - 1, self.last)
            beyond = self.sums.searchsorted(self.sums + (limit - self.extra_end + self.extra), side="right") - 1
            far = np.where(near < self.last, near, np.maximum(near, beyond))
        return np.maximum(far, np.arange(len(self.sums)))

    def farthest_from(self, start: int, limit: float) -> int:
        """Return the farthest end within the limit of a stage that begins at one cut point."""
        far = int(self.sums.searchsorted(self.sums[start] + limit, side="right")) - 1
        if self.extra is not None and self.extra_end is not None and self.last is not None:
            last, sums, extra = int(self.last[start]), self.sums[start:], self.extra[start:]
            with_extra = sums[: last - start + 1] + extra[: last - start + 1]
            near = start + int(with_extra.searchsorted(with_extra[0] + limit, side="right")) - 1
            rest = limit - float(self.extra_end[start]) + float(extra[0])
            beyond = start + int(sums.searchsorted(sums[0] + rest, side="right")) - 1
            far = near if near < last else max(near, beyond)
        return max(far, start)

    def __add__(self, other: SegmentSums | float) -> SegmentSums:
        """Return the cost of stages that is the sum of two costs. Adding 0 changes nothing."""
        if not isinstance(other, SegmentSums):
            assert other == 0, "a stage has no constant cost"
            return self
        sums = self.sums + other.sums
        if self.extra is None or other.extra is None or self.extra_end is None or other.extra_end is None:
            return SegmentSums(sums)
        return SegmentSums(sums, self.extra + other.extra, self.extra_end + other.extra_end, self.last)

    def __rmul__(self, factor: float) -> SegmentSums:
        """Return the cost of stages times a factor."""
        if self.extra is None or self.extra_end is None:
            return SegmentSums(factor * self.sums)
        return SegmentSums(factor * self.sums, factor * self.extra, factor * self.extra_end, self.last)


@frozen(eq=False)
class ChainBatch:
    """Chains of equal length, solved together: the arrays of `SegmentSums` of each, [chains, cut points]."""

    sums: FloatMatrix
    extra: FloatMatrix | None = None
    extra_end: FloatMatrix | None = None
    last: Indices | None = None

    @classmethod
    def of(cls, each: Sequence[SegmentSums]) -> ChainBatch:
        """Return a batch of these chains, of which all have an extra cost or none has."""
        names = ("sums", "extra", "extra_end", "last") if each[0].extra is not None else ("sums",)
        return cls(*(np.array([getattr(x, name) for x in each]) for name in names))

    def __len__(self) -> int:
        return len(self.sums)

    @property
    def size(self) -> int:
        """Return the number of segments of each chain."""
        return int(self.sums.shape[1]) - 1

    def take(self, which: Indices) -> ChainBatch:
        """Return the batch of these chains."""
        if self.extra is None or self.extra_end is None or self.last is None:
            return ChainBatch(self.sums[which])
        return ChainBatch(self.sums[which], self.extra[which], self.extra_end[which], self.last[which])

    def stages(self, start: Indices, end: Indices) -> FloatMatrix:
        """Return the cost of stages between these cut points: [chains, ...] each, or [1, ...] for all chains alike."""
        base = (np.arange(len(self)) * (self.size + 1)).reshape(-1, *[1] * (start.ndim - 1))
        begin, stop = start + base, end + base
        out: FloatMatrix = self.sums.take(stop) - self.sums.take(begin)
        if self.extra is not None and self.extra_end is not None and self.last is not None:
            inside = end <= self.last.take(begin)
            out = out + np.where(inside, self.extra.take(stop), self.extra_end.take(begin)) - self.extra.take(begin)
        return out

    def farthest(self, limits: FloatVector) -> Indices:
        """Return `SegmentSums.farthest` of each chain, within a limit of its own: [chains, cut points]."""
        allowed = limits[:, None]
        if self.extra is None or self.extra_end is None or self.last is None:
            far = _last_up_to(self.sums, self.sums + allowed)
        else:
            with_extra = self.sums + self.extra
            near = np.minimum(_last_up_to(with_extra, with_extra + allowed), self.last)
            beyond = _last_up_to(self.sums, self.sums + (allowed - self.extra_end + self.extra))
            far = np.where(near < self.last, near, np.maximum(near, beyond))
        return np.asarray(np.maximum(far, np.arange(self.size + 1)))


def _last_up_to(sums: FloatMatrix, limits: FloatMatrix) -> Indices:
    """Return the last of each row's ascending sums that is at most each limit of that row: [chains, cut points]."""
    rows = zip(sums, limits, strict=True)
    return np.array([each.searchsorted(limit, side="right") for each, limit in rows]) - 1


def balance(stages: SegmentSums, count: int, latest: LatestEnds | None = None) -> tuple[int, ...] | None:
    """Return the boundaries of `count` non-empty stages, as cut points, whose slowest stage is as fast as possible.

    Of these partitions it has the least sum of squares. latest(k)[i] is where stage k must end if it begins at cut
    point i. None if there is no such partition.
    """
    if count > len(stages):
        return None
    ends = None if latest is None else np.array([latest(k) for k in range(count)])
    if ends is not None and ends_too_early(ends):
        return None
    cuts = balance_all(stages.alone, count, ends)[0]
    return None if cuts[0] < 0 else tuple(cuts.tolist())


def balance_all(chains: ChainBatch, count: int, ends: Indices | None = None) -> Indices:
    """Return `balance` of each chain: [chains, count + 1]; a row of -1 where there is no partition.

    A chain has at least `count` segments. ends: [count, cut points], the latest end of each stage.
    """
    size = chains.size
    if count in (1, size) and ends is None:  # there is one partition only
        return np.tile(np.arange(0, size + 1, size // count), (len(chains), 1))
    caps = slowest_stage(chains, count)
    if chains.extra is None and ends is None:
        return solve(chains, count, caps)
    # With an extra cost or latest ends the cap may be too low: widen it until there is a partition, minimise the
    # slowest stage under it, then balance under that.
    out, todo = np.full((len(caps), count + 1), -1), np.arange(len(caps))
    here = np.arange(size)[None]
    enough = chains.stages(here, here + 1).sum(axis=1)  # no stage takes more than its segments one by one
    while len(todo):
        out[todo] = solve(chains.take(todo), count, caps[todo], ends, squares=False)
        todo = todo[(out[todo, 0] < 0) & (caps[todo] < enough[todo])]
        caps[todo] *= WIDER
    done = np.flatnonzero(out[:, 0] >= 0)
    if len(done):
        some, bounds = chains.take(done), out[done]
        out[done] = solve(some, count, some.stages(bounds[:, :-1], bounds[:, 1:]).max(axis=1), ends)
    return out


def slowest_stage(chains: ChainBatch, count: int) -> FloatVector:
    """Return the least possible time of the slowest of at most `count` stages: [chains].

    Bisection on the time cap. Fill stages greedily under the midpoint of [low, high]. If all segments fit, the slowest
    of these stages is the new `high`; else the least cap that admits one more segment to a stage is the new `low`. It
    ends when they meet. With an extra cost the result is a lower bound.
    """
    here, size, every = np.arange(chains.size)[None], chains.size, np.arange(len(chains))
    segments = chains.stages(here, here + 1)
    longest = segments.max(axis=1)
    low: FloatVector = np.maximum(chains.stages(np.array([[0]]), np.array([[size]]))[:, 0] / count, longest)
    high: FloatVector = segments.sum(axis=1) / count + longest  # greedy stages of the mean and one segment
    tried = low.copy()
    for _ in range(HALVINGS):
        far, ends = chains.farthest(tried * TOLERANCE), np.zeros((len(chains), count + 1), dtype=np.intp)
        for k in range(count):
            ends[:, k + 1] = far[every, ends[:, k]]
        fits = ends[:, -1] == size
        taken = chains.stages(ends[:, :-1], ends[:, 1:]).max(axis=1)
        one_more = chains.stages(ends[:, :-1], np.minimum(ends[:, 1:] + 1, size))
        high = np.where(fits, np.minimum(high, taken), high)
        low = np.where(fits, low, np.maximum(low, np.where(ends[:, 1:] < size, one_more, np.inf).min(axis=1)))
        if (low * TOLERANCE >= high).all():
            break
        tried = np.where(low * TOLERANCE >= high, high, (low + high) / 2)
    return high


def boundary_ranges(far: Indices, count: int) -> tuple[Indices, Indices] | None:
    """Return the earliest and the latest cut point of each boundary of `count` non-empty stages; None if impossible.

    far: where the longest stage from each cut point, or from one before it, ends.
    """
    furthest, size = far.tolist(), len(far) - 1
    nearest = far.searchsorted(np.arange(size + 1)).tolist()
    first, last = [size], [0]
    for k in range(1, count + 1):
        last.append(min(furthest[last[-1]], size - count + k))
        first.append(max(nearest[first[-1]], count - k))
    first.reverse()
    return (np.array(first), np.array(last)) if all(i <= j for i, j in zip(first, last, strict=True)) else None


def ends_too_early(ends: Indices) -> bool:
    """Return True if stages with these latest ends, [stages, cut points], cannot reach the end of the chain."""
    size, done = len(ends[0]), 0
    for furthest in np.maximum.accumulate(ends, axis=1):
        done = int(furthest[done])
        if done == size:
            return False
    return True


def solve(
    chains: ChainBatch, count: int, caps: FloatVector, ends: Indices | None = None, *, squares: bool = True
) -> Indices:
    """Return stage boundaries under a time cap by chain: [chains, count + 1]; -1 where there are none.

    squares: minimise the sum of squares of stage times; else the slowest stage. ends: [count, cut points], the latest
    end of each stage. Chains are solved together by the number of segments that a stage may have.
    """
    size, every = chains.size, np.arange(len(chains))
    far = chains.farthest(caps * TOLERANCE)
    # The first and the last possible cut point of each boundary, [chains, count + 1], none of the stages empty.
    furthest, base = np.maximum.accumulate(far, axis=1), every * (size + 1)
    reached = [furthest] * count
    if ends is not None:
        reached = [*np.maximum.accumulate(np.minimum(far[:, :-1], ends[:, None]), axis=2)]
    flat = (furthest + base[:, None]).ravel()
    nearest = flat.searchsorted(np.arange(len(flat))) - np.repeat(base, size + 1)
    latest, earliest = [np.zeros(len(far), dtype=np.intp)], [np.full(len(far), size)]
    for k in range(1, count + 1):
        latest.append(np.minimum(reached[k - 1][every, latest[-1]], size - count + k))
        earliest.append(np.maximum(nearest[base + earliest[-1]], count - k))
    first, last = np.array(earliest[::-1]).T, np.array(latest).T
    out = np.full((len(far), count + 1), -1)
    window = np.maximum(1, (far - np.arange(size + 1)).max(axis=1))  # most segments of a stage
    todo = np.flatnonzero((first <= last).all(axis=1))
    todo = todo[np.argsort(window[todo], kind="stable")]
    while len(todo):
        n = max(1, AT_ONCE // ((size + 1) * int(window[todo].max())))
        some, todo = todo[-n:], todo[:-n]
        band = list(zip(first[some].min(axis=0).tolist(), (last[some].max(axis=0) + 1).tolist(), strict=True))
        solved = chains if len(some) == len(every) == 1 else chains.take(some)
        out[some] = _recurrence(solved, far[some], int(window[some].max()), band, ends, squares)
    return out


def _recurrence(
    chains: ChainBatch,
    far: Indices,
    window: int,
    band: Sequence[tuple[int, int]],
    ends: Indices | None,
    squares: bool,
) -> Indices:
    """Return stage boundaries by dynamic programming: [chains, count + 1]; -1 where there are none.

    best[k, j] is the least cost of k stages that end at cut point j: min over i of best[k - 1, i] + t(i, j)^2, or of
    max(best[k - 1, i], t(i, j)), with j - window <= i < j, j <= far[i], and j at most the latest end of the stage.
    Boundary k lies in band[k]. Of equal totals the smallest i is taken, without a tolerance: between partitions that
    are equally balanced, rounding decides. It is the order of additions in node costs that fixes which one is found.
    """
    size = chains.size
    here = np.arange(size + 1)
    start = here[:, None] - np.arange(window, 0, -1)  # [ends, starts]: the last axis is contiguous
    allowed, start = (start >= 0) & (here[:, None] <= far[:, np.maximum(start, 0)]), np.maximum(start, 0)
    seconds = chains.stages(start[None], np.broadcast_to(here[:, None], start.shape)[None])
    cost = np.where(allowed, seconds**2 if squares else seconds, np.inf)
    # best: [boundaries, chains, window + cut points]; before: the same, at the possible starts of a stage by its end.
    best = np.full((len(band), len(far), window + size + 1), np.inf)
    before, best[0, :, window] = sliding_window_view(best, window, axis=2), 0.0
    choice = []
    for k, (first, last) in enumerate(band[1:]):
        earlier, step = before[k, :, first:last], cost[:, first:last]
        total = earlier + step if squares else np.maximum(earlier, step)
        if ends is not None:
            total = np.where(here[first:last, None] <= ends[k][start[first:last]], total, np.inf)
        choice.append(total.argmin(axis=2))
        total.min(axis=2, out=best[k + 1, :, first + window : last + window])
    out = np.full((len(far), len(band)), -1)
    solved = np.flatnonzero(np.isfinite(best[-1, :, -1]))
    out[solved, -1] = size
    for k in reversed(range(len(choice))):
        end = out[solved, k + 1]
        out[solved, k] = end - window + choice[k][solved, end - band[k + 1][0]]
    return out
