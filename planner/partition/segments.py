"""What runs of atoms take: all of them, without a table of all.

Protocol: `SegmentSums(i, j)` is what atoms i to j take, j left out; `far(limit)[i]` where the longest run from i ends that
takes no more. The first atoms of a run may take more than they do elsewhere, up to where `last` says. `ChainBatch` are
several of them, one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Indices = NDArray[np.intp]


@frozen(eq=False)
class SegmentSums:
    """Sums before each place, and what the atoms of a run's first part take more."""

    sums: Vector  # [places]
    more: Vector | None = None  # [places]: the same, of what they take more
    top: Vector | None = None  # [places]: of a run from here, `more` where that ends
    last: Indices | None = None  # [places]: the last place before that end

    @classmethod
    def of(cls, atoms: Vector) -> SegmentSums:
        """Runs of which each takes the sum of its atoms."""
        return cls(np.concatenate([[0.0], np.cumsum(atoms)]))

    def __len__(self) -> int:
        return len(self.sums) - 1

    def __call__(self, start: Indices, end: Indices) -> Vector:
        """What the atoms from `start` to `end` take."""
        out: Vector = self.sums.take(end) - self.sums.take(start)
        if self.more is not None and self.top is not None and self.last is not None:
            out = (
                out
                + np.where(end <= self.last.take(start), self.more.take(end), self.top.take(start))
                - self.more.take(start)
            )
        return out

    def far(self, limit: float | Vector) -> Indices:
        """Where the longest run from each place ends that takes no more than all may, or each; there, if none does."""
        far = self.sums.searchsorted(self.sums + limit, side="right") - 1
        if self.more is not None and self.top is not None and self.last is not None:
            both = self.sums + self.more
            near = np.minimum(both.searchsorted(both + limit, side="right") - 1, self.last)
            beyond = self.sums.searchsorted(self.sums + (limit - self.top + self.more), side="right") - 1
            far = np.where(near < self.last, near, np.maximum(near, beyond))
        return np.maximum(far, np.arange(len(self.sums)))

    def farthest(self, start: int, limit: float) -> int:
        """The same from one place."""
        far = int(self.sums.searchsorted(self.sums[start] + limit, side="right")) - 1
        if self.more is not None and self.top is not None and self.last is not None:
            last, sums, more = int(self.last[start]), self.sums[start:], self.more[start:]
            both = sums[: last - start + 1] + more[: last - start + 1]
            near = start + int(both.searchsorted(both[0] + limit, side="right")) - 1
            rest = limit - float(self.top[start]) + float(more[0])
            beyond = start + int(sums.searchsorted(sums[0] + rest, side="right")) - 1
            far = near if near < last else max(near, beyond)
        return max(far, start)

    def plus(self, other: SegmentSums, times: float) -> SegmentSums:
        """What runs take of both, of the other so many times."""
        if self.more is None or other.more is None or self.top is None or other.top is None:
            return SegmentSums(self.sums + times * other.sums)
        more, top = self.more + times * other.more, self.top + times * other.top
        return SegmentSums(self.sums + times * other.sums, more, top, self.last)

    def times(self, factor: float) -> SegmentSums:
        """What runs take, so many times."""
        return SegmentSums(
            factor * self.sums,
            None if self.more is None else factor * self.more,
            None if self.top is None else factor * self.top,
            self.last,
        )


@frozen(eq=False)
class ChainBatch:
    """ChainBatch of as many atoms each, whose places are numbered through, chain after chain."""

    each: tuple[SegmentSums, ...]
    runs: SegmentSums  # of all of them
    start: Indices  # the first place of each

    @classmethod
    def of(cls, each: Sequence[SegmentSums]) -> ChainBatch:
        """These, of all of which the first atoms of a run take more, or of none."""
        start = len(each[0].sums) * np.arange(len(each))
        if len(each) == 1:
            return cls((each[0],), each[0], start)
        sums = np.concatenate([x.sums for x in each])
        if each[0].more is None:
            return cls(tuple(each), SegmentSums(sums), start)
        more, top = (np.concatenate([getattr(x, name) for x in each]) for name in ("more", "top"))
        last = np.concatenate([x.last + first for x, first in zip(each, start, strict=True) if x.last is not None])
        return cls(tuple(each), SegmentSums(sums, more, top, last), start)

    def __len__(self) -> int:
        return len(self.each)

    @property
    def size(self) -> int:
        """The atoms of each."""
        return len(self.each[0])

    def take(self, which: Indices) -> ChainBatch:
        """Some of them."""
        return ChainBatch.of([self.each[i] for i in which.tolist()])

    def far(self, limits: Vector) -> Indices:
        """Where the longest runs end that take no more than the limit of their chain, as numbered there: by chain."""
        return np.array([x.far(limit) for x, limit in zip(self.each, limits.tolist(), strict=True)])
