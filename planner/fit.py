"""What the stages of a layout hold, and which ways to cut the graph fit the memory.

Protocol: a `Fit` is one layout with its sheet, a `Placed` that and one way to cut it. Bounds are positions in the
graph's nodes, one more than stages.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from attrs import frozen

from . import memory, timeline
from .cluster import Cluster
from .layout import Layout, Workload
from .memory import Part
from .practice import OWN, Practice
from .sheet import STEP, Col, Rows, Sheet
from .stages import Places, cut

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
    practice: Practice = OWN

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
        return cut(self._seconds, self.sheet.anatomy.graph.cuts, self.layout.pp * self.layout.vpp, self.latest)

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

    def latest(self, k: int) -> Places:
        """Where stage k must end to fit the memory, for each atom that it may begin at.

        Exact for one chunk a rank; several get equal shares of it.
        """
        layout, sheet = self.layout, self.sheet
        rank, chunk = k % layout.pp, k // layout.pp
        held = timeline.held(rank, layout.pp, layout.vpp, self.microbatches)
        flights = MORE * max(flight[chunk] for flight in held)
        logits = (self.workload.precision.nbytes + memory.COPY) * sheet.logits if rank == layout.pp - 1 else 0
        room = (self._free - MORE * logits) / layout.vpp - (flights * sheet.boundary if k else 0)
        state, saved = self._sums
        needs = state + flights * saved
        return np.searchsorted(needs, needs[:-1] + room, side="right") - 1

    @cached_property
    def _free(self) -> float:
        """Bytes that a rank may fill with what its stages hold."""
        return capacity(self.cluster) - memory.runtime(self.layout, self.cluster) - MORE * self.sheet.workspace

    @cached_property
    def _sums(self) -> tuple[Rows, Rows]:
        """Bytes of the state and of what one micro-batch saves, of all atoms before each cut."""
        atoms = np.add.reduceat(self.sheet.by_node, (0, *self.sheet.anatomy.graph.cuts))
        sums = np.concatenate([np.zeros((1, len(Col))), np.cumsum(atoms, axis=0)])
        n, precision = 10**6, self.workload.precision
        dense, expert = (
            sum(memory.static(*x, self.layout, precision, self.practice).values()) / n for x in ((n, 0), (0, n))
        )
        return dense * sums[:, Col.PARAMS] + expert * sums[:, Col.EXPERT_PARAMS], sums[:, Col.SAVED]


@frozen(eq=False, slots=False)
class Placed:
    """A layout whose stages have a place: what each pipeline rank then holds."""

    fit: Fit
    bounds: Bounds

    @property
    def layout(self) -> Layout:
        """The layout that is placed."""
        return self.fit.layout

    @property
    def capacity(self) -> int:
        """Bytes of a device that may be filled."""
        return capacity(self.fit.cluster)

    @cached_property
    def parts(self) -> list[Part]:
        """What each stage holds."""
        return self.fit.parts(self.bounds)

    @cached_property
    def nbytes(self) -> tuple[dict[str, int], ...]:
        """The memory of each pipeline rank at its fullest, by holder."""
        layout, m, precision = self.layout, self.fit.microbatches, self.fit.workload.precision
        beside = memory.runtime(layout, self.fit.cluster)
        ranks = range(layout.pp)
        practice = self.fit.practice
        return tuple(memory.peak(self.parts[r :: layout.pp], r, layout, m, precision, beside, practice) for r in ranks)

    @property
    def peaks(self) -> tuple[int, ...]:
        """The bytes that each pipeline rank holds at its fullest."""
        return tuple(sum(held.values()) for held in self.nbytes)

    @property
    def excess(self) -> int:
        """Bytes that the fullest rank lacks; negative when there is room."""
        return max(self.peaks) - self.capacity

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory for its stages."""
        return self.excess <= 0

    def tight(self) -> Placed:
        """The same layout cut to fit the memory, if that can be; else as it is."""
        bounds = self.fit.tight()
        return self if bounds is None else Placed(self.fit, bounds)

    @cached_property
    def sums(self) -> Rows:
        """What each stage costs for a micro-batch: [stages, columns]."""
        return self.fit.sheet.sums(self.bounds)

    @property
    def seconds(self) -> list[float]:
        """Those of a micro-batch through each stage, both ways."""
        seconds: list[float] = self.sums[:, STEP].sum(axis=1).tolist()
        return seconds


def stages_of(nodes: tuple[int, ...], bounds: Bounds) -> list[int]:
    """The stage of each of these nodes."""
    return [int(np.searchsorted(bounds, node, side="right")) - 1 for node in nodes]
