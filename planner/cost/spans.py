"""What runs of atoms take: all of them, without a table of all.

Protocol: `Spans(i, j)` is what atoms i to j take, j left out; `far(limit)[i]` where the longest run from i ends that
takes no more. The first atoms of a run may take more than they do elsewhere, up to where `last` says.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Places = NDArray[np.intp]


@frozen(eq=False)
class Spans:
    """Sums before each place, and what the atoms of a run's first part take more."""

    sums: Vector  # [places]
    more: Vector | None = None  # [places]: the same, of what they take more
    top: Vector | None = None  # [places]: of a run from here, `more` where that ends
    last: Places | None = None  # [places]: the last place before that end

    @classmethod
    def of(cls, atoms: Vector) -> Spans:
        """Runs of which each takes the sum of its atoms."""
        return cls(np.concatenate([[0.0], np.cumsum(atoms)]))

    def __len__(self) -> int:
        return len(self.sums) - 1

    def __call__(self, start: Places, end: Places) -> Vector:
        """What the atoms from `start` to `end` take."""
        out: Vector = self.sums[end] - self.sums[start]
        if self.more is not None and self.top is not None and self.last is not None:
            out = out + np.where(end <= self.last[start], self.more[end], self.top[start]) - self.more[start]
        return out

    def far(self, limit: float | Vector) -> Places:
        """Where the longest run from each place ends that takes no more than all may, or each; there, if none does."""
        far = np.searchsorted(self.sums, self.sums + limit, side="right") - 1
        if self.more is not None and self.top is not None and self.last is not None:
            both = self.sums + self.more
            near = np.minimum(np.searchsorted(both, both + limit, side="right") - 1, self.last)
            beyond = np.searchsorted(self.sums, self.sums + (limit - self.top + self.more), side="right") - 1
            far = np.where(near < self.last, near, np.maximum(near, beyond))
        return np.maximum(far, np.arange(len(self.sums)))

    def farthest(self, start: int, limit: float) -> int:
        """The same from one place."""
        far = int(np.searchsorted(self.sums, self.sums[start] + limit, side="right")) - 1
        if self.more is not None and self.top is not None and self.last is not None:
            last, sums, more = int(self.last[start]), self.sums[start:], self.more[start:]
            both = sums[: last - start + 1] + more[: last - start + 1]
            near = start + int(np.searchsorted(both, both[0] + limit, side="right")) - 1
            rest = limit - float(self.top[start]) + float(more[0])
            beyond = start + int(np.searchsorted(sums, sums[0] + rest, side="right")) - 1
            far = near if near < last else max(near, beyond)
        return max(far, start)

    def plus(self, other: Spans, times: float) -> Spans:
        """What runs take of both, of the other so many times."""
        if self.more is None or other.more is None or self.top is None or other.top is None:
            return Spans(self.sums + times * other.sums)
        more, top = self.more + times * other.more, self.top + times * other.top
        return Spans(self.sums + times * other.sums, more, top, self.last)

    def times(self, factor: float) -> Spans:
        """What runs take, so many times."""
        return Spans(
            factor * self.sums,
            None if self.more is None else factor * self.more,
            None if self.top is None else factor * self.top,
            self.last,
        )
