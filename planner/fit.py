"""What the stages of a layout hold, and which ways to cut the graph fit the memory.

Protocol: a `Fit` is one layout with its sheet. Bounds are positions in the graph's nodes, one more than stages.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from . import memory, timeline
from .cluster import Cluster
from .layout import Layout, Workload
from .memory import Part
from .sheet import STEP, Col, Rows, Sheet
from .stages import cut

# What a plan leaves free: the prediction is not exact, and an allocator that is nearly full stalls.
HEADROOM = 0.05
MORE = 1 + memory.ALLOCATOR

Bounds = tuple[int, ...]


def capacity(cluster: Cluster) -> int:
    """Bytes of a device that a plan may fill."""
    return int(cluster.device.nbytes * (1 - HEADROOM))


@frozen(eq=False, slots=False)
class Fit:
    """A layout, and what the nodes of the graph cost under it."""

    layout: Layout
    sheet: Sheet
    workload: Workload
    cluster: Cluster

    @property
    def microbatches(self) -> int:
        """In a step, on each data-parallel copy."""
        return self.layout.microbatches(self.workload.batch)

    def even(self) -> Bounds:
        """The most even cut in time, whatever it holds. The layout must be legal."""
        bounds = cut(self._seconds, self.sheet.anatomy.graph.cuts, self.layout.pp * self.layout.vpp)
        assert bounds is not None, "more stages than the graph can be cut into"
        return bounds

    def tight(self) -> Bounds | None:
        """The most even cut in time of those that fit the memory, if any does."""
        if not self._possible():
            return None
        return cut(self._seconds, self.sheet.anatomy.graph.cuts, self.layout.pp * self.layout.vpp, self.allowed)

    @property
    def _seconds(self) -> Rows:
        seconds: Rows = self.sheet.by_node[:, STEP].sum(axis=1)
        return seconds

    def parts(self, bounds: Bounds) -> list[Part]:
        """What each stage holds. A weight that several nodes of a rank share is there once."""
        sheet, last = self.sheet, len(bounds) - 2
        spare = self._spare(bounds)
        return [
            Part(
                params=int(row[Col.PARAMS]) - spare[i],
                expert_params=int(row[Col.EXPERT_PARAMS]),
                saved=int(row[Col.SAVED]) + (sheet.boundary if i else 0),
                workspace=sheet.workspace,
                logits=sheet.logits if i == last else 0,
            )
            for i, row in enumerate(sheet.sums(bounds))
        ]

    def _spare(self, bounds: Bounds) -> list[int]:
        """The elements that each stage counts of weights that it, or an earlier stage of its rank, has already."""
        spare = [0] * (len(bounds) - 1)
        for (_, nodes), elements in zip(self.sheet.anatomy.shared, self.sheet.shared, strict=True):
            seen: set[int] = set()
            for stage in stages_of(nodes, bounds):
                spare[stage] += elements * (stage % self.layout.pp in seen)
                seen.add(stage % self.layout.pp)
        return spare

    def peaks(self, parts: list[Part]) -> tuple[dict[str, int], ...]:
        """The memory of each pipeline rank at its fullest, by holder."""
        pp, m, precision = self.layout.pp, self.microbatches, self.workload.precision
        beside = memory.runtime(self.layout, self.cluster)
        return tuple(memory.peak(parts[r::pp], r, self.layout, m, precision, beside) for r in range(pp))

    def fits(self, bounds: Bounds) -> bool:
        """Whether every rank has the memory for these stages."""
        return max(sum(held.values()) for held in self.peaks(self.parts(bounds))) <= capacity(self.cluster)

    def allowed(self, k: int) -> NDArray[np.bool_]:
        """Which runs of atoms fit the memory as stage k. Exact for one chunk a rank; several get equal shares of it."""
        need, room = self._need(k)
        fits: NDArray[np.bool_] = need[None, :] - need[:, None] <= room
        return fits

    def _need(self, k: int) -> tuple[Rows, float]:
        """The bytes that all atoms before each cut would hold as stage k, and those that a stage k may hold."""
        layout, sheet = self.layout, self.sheet
        rank, chunk = k % layout.pp, k // layout.pp
        held = timeline.held(rank, layout.pp, layout.vpp, self.microbatches)
        flights = MORE * max(flight[chunk] for flight in held)
        logits = memory.LOSS[self.workload.precision] * sheet.logits if rank == layout.pp - 1 else 0
        room = capacity(self.cluster) - memory.runtime(layout, self.cluster) - MORE * (sheet.workspace + logits)
        state, saved = self._sums
        return state + flights * saved, room / layout.vpp - (flights * sheet.boundary if k else 0)

    def _possible(self) -> bool:
        """Whether any cut is allowed: if one is, then so is the one whose stages each take all that they may."""
        count, atoms, done = self.layout.pp * self.layout.vpp, len(self._sums[0]) - 1, 0
        for k in range(count):
            need, room = self._need(k)
            most = int(np.searchsorted(need, need[done] + room, side="right")) - 1
            most = min(most, atoms - (count - 1 - k))  # each later stage takes one at least
            if most <= done:
                return False
            done = most
        return done == atoms

    @cached_property
    def _sums(self) -> tuple[Rows, Rows]:
        """Bytes of the state and of what one micro-batch saves, of all atoms before each cut."""
        atoms = np.add.reduceat(self.sheet.by_node, (0, *self.sheet.anatomy.graph.cuts))
        sums = np.concatenate([np.zeros((1, len(Col))), np.cumsum(atoms, axis=0)])
        n, precision = 10**6, self.workload.precision
        dense, expert = (sum(memory.static(*x, self.layout, precision).values()) / n for x in ((n, 0), (0, n)))
        return dense * sums[:, Col.PARAMS] + expert * sums[:, Col.EXPERT_PARAMS], sums[:, Col.SAVED]


def stages_of(nodes: tuple[int, ...], bounds: Bounds) -> list[int]:
    """The stage of each of these nodes."""
    return [int(np.searchsorted(bounds, node, side="right")) - 1 for node in nodes]
