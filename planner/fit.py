"""What the stages of a layout hold, and which ways to cut the graph fit the memory.

Protocol: a `Fit` is one layout with its sheet, a `Placed` that and one way to cut it. Bounds are positions in the
graph's nodes, one more than stages.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from . import memory, timeline
from .cluster import Cluster
from .layout import Layout, Workload
from .memory import MORE, Part
from .practice import OWN, Practice
from .sheet import STEP, Col, Rows, Sheet
from .spans import Places, Spans
from .stages import Latest, evenest

# What a plan leaves free: the prediction is not exact, and an allocator that is nearly full stalls.
HEADROOM = 0.05

Bounds = tuple[int, ...]


def capacity(cluster: Cluster, headroom: float = HEADROOM) -> int:
    """Bytes of a device that a plan may fill."""
    return int(cluster.device.nbytes * (1 - headroom))


@frozen(eq=False, slots=False)
class Fit:
    """A layout, and what the nodes of the graph cost under it."""

    layout: Layout
    sheet: Sheet
    workload: Workload
    cluster: Cluster
    practice: Practice = OWN
    headroom: float = HEADROOM

    @property
    def microbatches(self) -> int:
        """In a step, on each data-parallel copy."""
        return self.layout.microbatches(self.workload.batch)

    def even(self) -> Bounds:
        """The most even cut in time, whatever it holds. The layout must be legal."""
        bounds = self._cut()
        assert bounds is not None, "more stages than the graph can be cut into"
        return bounds

    def tight(self) -> Bounds | None:
        """The most even cut in time of those that fit the memory, if any does."""
        return self._cut(self.latest)

    def _cut(self, latest: Latest | None = None) -> Bounds | None:
        chosen = evenest(self.sheet.seconds, self.layout.pp * self.layout.vpp, latest)
        return None if chosen is None else tuple(int(self.sheet.anatomy.places[i]) for i in chosen)

    def parts(self, bounds: Bounds) -> list[Part]:
        """What each stage holds. A weight that several nodes of a rank share is there once."""
        sheet, last = self.sheet, len(bounds) - 2
        spare = self.spare(bounds)
        return [
            Part(
                params=int(row[Col.PARAMS]) - spare[i],
                expert_params=int(row[Col.EXPERT_PARAMS]),
                saved=int(row[Col.SAVED]) + (sheet.boundary if i else 0),
                workspace=sheet.workspace,
                library=self.library,
                loss=sheet.loss if i == last else 0,
            )
            for i, row in enumerate(sheet.sums(bounds))
        ]

    @property
    def library(self) -> int:
        """Bytes that are there throughout, for libraries and for what passes between ranks."""
        pp = self.layout.pp
        passed = memory.PASSED + (pp if self.practice.outputs else 0)
        return self.sheet.library + (passed * self.sheet.boundary if pp > 1 else 0)

    def spare(self, bounds: Bounds) -> list[int]:
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
        flights, room = self._limit(k)
        state, saved, stepping = self._sums
        ends: Places = np.minimum(state.plus(saved, flights).far(room), stepping.far(self._free / self.layout.vpp))
        return ends[:-1]

    @cached_property
    def hopeful(self) -> bool:
        """Whether stages that each take as much as `latest` allows reach the end: else no tight cut fits."""
        state, saved, stepping = self._sums
        done, size = 0, len(state)
        for k in range(self.layout.pp * self.layout.vpp):
            flights, room = self._limit(k)
            most = stepping.farthest(done, self._free / self.layout.vpp)
            done = min(state.plus(saved, flights).farthest(done, room), most)
            if done == size:
                return True
        return False

    def _limit(self, k: int) -> tuple[float, float]:
        """How often stage k keeps what a micro-batch saves, allocator included, and the bytes that are there for it."""
        layout, sheet = self.layout, self.sheet
        rank, chunk = k % layout.pp, k // layout.pp
        flights = MORE * float(self._flights[rank, chunk])
        comes = max(sheet.workspace, sheet.loss) if rank == layout.pp - 1 else sheet.workspace
        return flights, (self._free - MORE * comes) / layout.vpp - (flights * sheet.boundary if k else 0)

    @cached_property
    def _flights(self) -> NDArray[np.int64]:
        """The most that each rank has in flight of each chunk."""
        x = self.layout
        most: NDArray[np.int64] = timeline.flights(x.pp, x.vpp, self.microbatches, x.microbatch_group).max(axis=1)
        return most

    @cached_property
    def _free(self) -> float:
        """Bytes that a rank may fill with what its stages hold."""
        return capacity(self.cluster, self.headroom) - memory.runtime(self.layout, self.cluster) - MORE * self.library

    @cached_property
    def _sums(self) -> tuple[Spans, Spans, Spans]:
        """For each two places, the bytes of the state, of what one micro-batch saves, of the optimizer's step."""
        n, x, precision, practice = 10**6, self.layout, self.workload.precision, self.practice
        static = [sum(memory.static(*of, x, precision, practice).values()) / n for of in ((n, 0), (0, n))]
        whole = [
            s + MORE * memory.stepping(*of, x, practice) / n for s, of in zip(static, ((n, 0), (0, n)), strict=True)
        ]
        dense, experts = self.sheet.runs(Col.PARAMS), self.sheet.runs(Col.EXPERT_PARAMS)
        state, stepping = (dense.times(each[0]).plus(experts, each[1]) for each in (static, whole))
        return state, self.sheet.runs(Col.SAVED), stepping


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
        return capacity(self.fit.cluster, self.fit.headroom)

    @cached_property
    def parts(self) -> list[Part]:
        """What each stage holds."""
        return self.fit.parts(self.bounds)

    @cached_property
    def fullest(self) -> tuple[memory.Peak, ...]:
        """The memory of each pipeline rank at its fullest."""
        layout, m, precision = self.layout, self.fit.microbatches, self.fit.workload.precision
        beside = memory.runtime(layout, self.fit.cluster)
        ranks = range(layout.pp)
        practice = self.fit.practice
        return tuple(memory.peak(self.parts[r :: layout.pp], r, layout, m, precision, beside, practice) for r in ranks)

    @property
    def peaks(self) -> tuple[int, ...]:
        """The bytes that each pipeline rank holds at its fullest."""
        return tuple(peak.nbytes for peak in self.fullest)

    @cached_property
    def excess(self) -> int:
        """Bytes that the fullest rank lacks; negative when there is room."""
        return int(self._needed.max()) - self.capacity

    @property
    def _needed(self) -> NDArray[np.float64]:
        """The bytes of each pipeline rank at its fullest: those of `fullest`, to a few bytes, and sooner."""
        fit, x, sums = self.fit, self.layout, self.sums
        by_rank = sums.reshape(x.vpp, x.pp, -1)
        params = (sums[:, Col.PARAMS] - fit.spare(self.bounds)).reshape(x.vpp, x.pp).sum(axis=0)
        experts = by_rank[:, :, Col.EXPERT_PARAMS].sum(axis=0)
        saved = by_rank[:, :, Col.SAVED] + np.where(np.arange(len(sums)), fit.sheet.boundary, 0).reshape(x.vpp, x.pp)
        schedule = (x.pp, x.vpp, fit.microbatches, x.microbatch_group)
        kept = (timeline.flights(*schedule) * saved.T[:, None, :]).sum(axis=2).max(axis=1)
        comes = np.maximum(kept + fit.sheet.workspace, memory.stepping(params, experts, x, fit.practice))
        loss = max(float(saved[:, -1] @ flight) for flight in timeline.losses(*schedule)) + fit.sheet.loss
        comes[-1] = max(comes[-1], loss)
        static = memory.static(params, experts, x, fit.workload.precision, fit.practice)
        needed: NDArray[np.float64] = (
            sum(static.values()) + MORE * (comes + fit.library) + memory.runtime(x, fit.cluster)
        )
        return needed

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
