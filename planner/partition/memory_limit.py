"""What the ranks of a cut need of their memory, and which cuts have room, on plain numbers.

Protocol: `MemoryLimit` says it of many cuts at once, of the one stage of a rank by itself, and when no cut at all has room.
A cut is the places that bound its stages; stage s is chunk s // ranks of rank s % ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from .segments import Indices, SegmentSums, Vector

Rows = NDArray[np.float64]
SAME = 1 + 1e-12  # sums of the same numbers in another order
FULLEST = 4  # moments of a rank by which cuts that differ little are told apart


@frozen(eq=False, slots=False)
class MemoryLimit:
    """A rank holds the state of its chunks, what each micro-batch in flight saves of them, and what comes and goes."""

    state: SegmentSums  # bytes between each two places
    stepping: SegmentSums  # the same while the optimizer steps, when nothing is in flight
    saved: SegmentSums  # of one micro-batch
    flights: Rows  # [ranks, moments, chunks]: micro-batches in flight
    comes: Rows  # [ranks, moments]: bytes that are there then
    received: Vector  # [places]: bytes more that one micro-batch saves of a chunk that begins there
    passed: Vector  # [places]: bytes that are there for what passes to a chunk that begins there, of a rank's the most
    beside: float  # bytes that are there throughout
    room: float  # bytes of each rank
    element: tuple[float, float] = (0.0, 0.0)  # bytes of an element of a dense weight: of `state`, of `stepping`

    @property
    def ranks(self) -> int:
        """How many."""
        return len(self.flights)

    @property
    def chunks(self) -> int:
        """How many each rank has."""
        return int(self.flights.shape[2])

    def near(self, cut: Indices) -> MemoryLimit:
        """The same at the fullest moments of this cut only, the fullest first, which is known sooner.

        Of cuts that differ much other moments may be fuller.
        """
        saved = self._kept(cut[:-1], cut[1:]).reshape(self.chunks, self.ranks)
        kept = np.einsum("rmc,cr->rm", self.flights, saved) + self.comes
        fullest = np.argsort(-kept, axis=1, kind="stable")[:, :FULLEST]
        flights = np.take_along_axis(self.flights, fullest[:, :, None], axis=1)
        return evolve(self, flights=flights, comes=np.take_along_axis(self.comes, fullest, axis=1))

    def needed(self, cuts: Indices, twice: Vector | float = 0.0) -> Rows:
        """Bytes of each rank at its fullest, [cuts, bounds] -> [cuts, ranks]; `twice` are elements that it has once,
        but are counted again."""
        start, end = cuts.T[:-1], cuts.T[1:]  # numpy is quick along the last axis
        if self.state.more is None:  # in one go, as this is asked of many cuts
            every = self._ends.take(end, axis=1)
            every -= self._begins.take(start, axis=1)
        else:
            every = np.array([self.state(start, end), self.stepping(start, end), self._kept(start, end)])
        every = every.reshape(3, self.chunks, self.ranks, -1)
        passed: Rows | float = float(self.passed[0])
        if self._more_passes:
            passed = self.passed[start].reshape(every.shape[1:]).max(axis=0)
        state, stepping = every[:2].sum(axis=1)
        kept = (self.flights @ every[2].transpose(1, 0, 2) + self.comes[..., None]).max(axis=1)
        again = np.reshape(twice, (-1, 1))
        passing = state - self.element[0] * again + kept
        needed: Rows = (np.maximum(passing, stepping - self.element[1] * again) + passed + self.beside).T
        return needed

    @cached_property
    def _ends(self) -> Rows:
        """Bytes of the state, while stepping, and saved, before each place that a stage ends at: [3, places]."""
        return np.array([self.state.sums, self.stepping.sums, self.saved.sums])

    @cached_property
    def _begins(self) -> Rows:
        """The same before each place that one begins at, what it is given not."""
        return np.array([self.state.sums, self.stepping.sums, self.saved.sums - self.received])

    @cached_property
    def _more_passes(self) -> bool:
        """Whether at some place more passes than at the first."""
        return bool(self.passed.max() > self.passed[0])

    def _kept(self, start: Indices, end: Indices) -> Vector:
        """What one micro-batch saves of stages between these places."""
        if self.saved.more is None:
            return self.saved.sums[end] - (self.saved.sums - self.received)[start]
        return self.saved(start, end) + self.received[start]

    def lacks(self, cuts: Indices) -> Vector:
        """What the ranks of each cut lack, all together, in parts of a rank's room: 0 where all have enough."""
        lacking: Vector = np.maximum(self.needed(cuts) / (self.room * SAME) - 1, 0).sum(axis=1)
        return lacking

    def latest(self, k: int) -> Indices:
        """Where stage k must end, for each place that it may begin at, if each rank has one: exact."""
        ends: Indices = np.minimum.reduce([needs.far(room) for needs, room in self._alone(k)])
        return ends[:-1]

    @property
    def shared(self) -> Indices:
        """Where each stage must end, for each place that it may begin at, if a rank's chunks have equal shares of it.

        [stages, places]; it is those of a rank's first moment.
        """
        each = (self.room - self.beside - self.passed) / self.chunks
        moments = list(zip(self.flights[:, 0].T.ravel().tolist(), self.comes[:, 0].tolist() * self.chunks, strict=True))
        ends = {
            (flights, comes): self.state.plus(self.saved, flights).far(
                each - comes / self.chunks - flights * self.received
            )
            for flights, comes in {*moments}
        }
        latest: Indices = np.minimum([ends[moment] for moment in moments], self.stepping.far(each))
        return latest[:, :-1]

    @property
    def enough(self) -> bool:
        """Whether there is a cut that has room, if each rank has one stage, which may be empty."""
        done, size = 0, len(self.state)
        for k in range(self.ranks):
            begins = slice(1, None) if k else slice(1)  # the first stage with nothing, each other with the least
            done = min(needs.farthest(done, float(room[begins].max())) for needs, room in self._alone(k))
            if done == size:
                return True
        return False

    def _alone(self, k: int) -> list[tuple[SegmentSums, Vector]]:
        """What a rank's only stage needs between each two places, and the bytes there are: at its fullest moments."""
        room = self.room * SAME - self.beside - self.passed
        moments = {*zip(self.flights[k, :, 0].tolist(), self.comes[k].tolist(), strict=True)}
        most = [a for a in moments if not any(a != b and a[0] <= b[0] and a[1] <= b[1] for b in moments)]
        kept = [(self.state.plus(self.saved, n), room - comes - n * self.received) for n, comes in most]
        return [(self.stepping, room), *kept]

    def hopeless(self, runs: SegmentSums, seconds: float) -> bool:
        """Whether it is certain that no cut has room whose stages take no longer than this.

        Each stage begins and ends where those before and after it can reach, and holds no more than the most between
        such places. The ranks up to any one must hold what all others can't: of the state, and of what is saved where
        it is in flight the least. They have no more room than all of theirs together.
        """
        far = np.maximum.accumulate(runs.far(seconds))
        bounds = reach(far, self.chunks * self.ranks)
        if bounds is None:
            return True
        (least, most), (lean, full) = _held((self.state, self.saved), far, *bounds)
        rank, all_ranks = np.arange(self.chunks * self.ranks) % self.ranks, np.arange(self.ranks)
        moment = self.flights.sum(axis=2).argmax(axis=1)
        flights = self.flights[all_ranks, moment].T.ravel()
        received = np.where(np.arange(len(rank)), self.received[1:].min(), self.received[0])
        fixed = np.bincount(rank, received * flights) + self.comes[all_ranks, moment] + self.beside + self.passed.min()
        state, saved = (_whole(held, len(rank)) for held in (self.state, self.saved))
        mine = rank <= all_ranks[:, None]  # [sets of ranks, stages]
        held = np.maximum(mine @ least, state - ~mine @ most)
        kept = _least(np.where(mine, flights, 0), lean, full, saved)
        if (held + kept + np.cumsum(fixed) > self.room * SAME * (all_ranks + 1)).any():
            return True
        alone = np.bincount(rank, least + flights * lean) + fixed
        return bool(alone.max() > self.room * SAME)


def reach(far: Indices, count: int) -> tuple[Indices, Indices] | None:
    """The first and the last place of each bound of so many runs, none empty; None if there is no way.

    far: where the longest run from each place ends, or from one before it.
    """
    furthest, size = far.tolist(), len(far) - 1
    nearest = far.searchsorted(np.arange(size + 1)).tolist()
    first, last = [size], [0]
    for k in range(1, count + 1):
        last.append(min(furthest[last[-1]], size - count + k))
        first.append(max(nearest[first[-1]], count - k))
    first.reverse()
    return (np.array(first), np.array(last)) if all(i <= j for i, j in zip(first, last, strict=True)) else None


def _held(each: Sequence[SegmentSums], far: Indices, first: Indices, last: Indices) -> list[tuple[Vector, Vector]]:
    """The least and the most that each run holds between two bounds that are in reach, of each of these."""
    width = np.arange(int((last - first)[:-1].max()) + 1)
    start = np.minimum(first[:-1, None] + width, last[:-1, None])
    nearest, furthest = np.maximum(start + 1, first[1:, None]), np.minimum(far.take(start), last[1:, None])
    return [(held(start, nearest).min(axis=1), held(start, furthest).max(axis=1)) for held in each]


def _whole(held: SegmentSums, count: int) -> float:
    """What so many runs hold together at the least: the first atoms of a run may take less than they do elsewhere."""
    whole = float(held.sums[-1])
    if held.more is None or held.top is None:
        return whole
    return whole + max(min(0.0, float(held.more[-1])), count * min(0.0, float((held.top - held.more).min())))


def _least(weights: Rows, least: Vector, most: Vector, total: float) -> Vector:
    """The least weighted sums of parts, each at its least or more and at its most or less, that add up to a total."""
    order = np.argsort(weights, axis=1, kind="stable")
    rest = max(0.0, total - float(least.sum()))
    more = np.minimum(np.cumsum((most - least)[order], axis=1), rest)
    more[:, 1:] -= more[:, :-1].copy()
    sums: Vector = weights @ least + (np.sort(weights, axis=1) * more).sum(axis=1)
    return sums
