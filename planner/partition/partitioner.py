"""What the stages of a layout hold, and which ways to cut the graph fit the memory.

Protocol: a `PartitionProblem` is one layout with its sheet, a `Partition` that and one way to cut it. StageBounds are positions in the
graph's nodes, one more than stages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from attrs import frozen

from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Rows
from megaloom.planner.contract.workload import Workload
from megaloom.planner.cost import memory
from megaloom.planner.cost.cost_table import STEP_COLUMNS, CostColumn, CostTable
from megaloom.planner.cost.memory import ALLOCATED, StageMemory
from megaloom.planner.cost.profiles.frameworks import OWN
from megaloom.planner.cost.profiles.groups import FrameworkProfile
from megaloom.planner.simulate import schedule

from .dynamic_program import evenest
from .local_search import (
    SLOWEST_FACTOR,
    level_ranks,
    level_within_limit,
    partition_within_limit,
)
from .memory_limit import SAME, MemoryLimit, reach
from .segments import Indices, SegmentSums, Vector

# What a plan leaves free: the prediction is not exact, and an allocator that is nearly full stalls.
HEADROOM = 0.05

StageBounds = tuple[int, ...]


def capacity(cluster: Cluster, headroom: float = HEADROOM) -> int:
    """Bytes of a device that a plan may fill."""
    return int(cluster.device.nbytes * (1 - headroom))


@frozen(eq=False, slots=False)
class PartitionProblem:
    """A layout, and what the nodes of the graph cost under it."""

    layout: Layout
    table: CostTable
    workload: Workload
    cluster: Cluster
    profile: FrameworkProfile = OWN
    headroom: float = HEADROOM
    whole: bool = False  # whether stages begin and end with whole blocks

    @property
    def microbatches(self) -> int:
        """In a step, on each data-parallel copy."""
        return self.layout.microbatches(self.workload.batch)

    @cached_property
    def places(self) -> Indices:
        """Where a stage may begin or end."""
        structure = self.table.structure
        return structure.block_cut_points if self.whole else structure.cut_points

    @cached_property
    def seconds(self) -> SegmentSums:
        """Of a micro-batch between each two places, both ways."""
        return self.table.runs(self.places, STEP_COLUMNS)

    def even(self) -> StageBounds:
        """The most even cut in time, whatever it holds. There must be places for so many stages."""
        bounds = self._bounds(evenest(self.seconds, self.layout.pp * self.layout.vpp))
        assert bounds is not None, "more stages than the graph can be cut into"
        return bounds

    def reaches(self, seconds: float) -> bool:
        """Whether stages may all be as quick as this, whatever they hold."""
        far = np.maximum.accumulate(self.seconds.far(seconds * SAME))
        return reach(far, self.layout.pp * self.layout.vpp) is not None

    def level(self, even: StageBounds) -> StageBounds:
        """Interleaved chunks, whatever they hold, the slowest as quick as in the most even cut: see `leveled`."""
        bounds = self._bounds(level_ranks(self.seconds, self.cut(even), self.layout.pp))
        assert bounds is not None
        return bounds

    def roomy(self, even: StageBounds) -> StageBounds | None:
        """A cut that fits the memory, if one is found: with as quick a slowest stage as can be, see `joint`.

        `even` is the most even one, whatever it holds.
        """
        cut = self.cut(even)
        fits = self.rooms.lacks(cut[None])[0] <= 0
        if self.layout.vpp == 1:
            return even if fits else self._bounds(evenest(self.seconds, self.layout.pp, self.rooms.latest))
        return self._bounds(
            level_within_limit(self.seconds, cut, self.rooms)
            if fits
            else partition_within_limit(self.seconds, cut, self.rooms)
        )

    def hopeful(self, even: StageBounds) -> bool:
        """Whether a cut that fits the memory may be found, if weights that stages share are counted as often.

        `even` is the most even one, whatever it holds.
        """
        if self.layout.vpp == 1:
            return self.rooms.enough
        cut = self.cut(even)
        return not self.rooms.hopeless(self.seconds, SLOWEST_FACTOR * float(self.seconds(cut[:-1], cut[1:]).max()))

    def cut(self, bounds: StageBounds) -> Indices:
        """StageBounds as the numbers of their places."""
        return self.places.searchsorted(bounds)

    def _bounds(self, cut: Sequence[int] | Indices | None) -> StageBounds | None:
        return None if cut is None else tuple(int(self.places[i]) for i in cut)

    def parts(self, bounds: StageBounds) -> list[StageMemory]:
        """What each stage holds. A weight that several nodes of a rank share is there once."""
        sheet, last = self.table, len(bounds) - 2
        spare, (received, passed) = self.spare(bounds), self._crossing(np.array(bounds[:-1]))
        return [
            StageMemory(
                params=int(row[CostColumn.PARAMS]) - spare[i],
                expert_params=int(row[CostColumn.EXPERT_PARAMS]),
                saved=int(row[CostColumn.SAVED]) + int(received[i]),
                workspace=sheet.workspace,
                library=sheet.library + int(passed[i]),
                loss=sheet.loss if i == last else 0,
            )
            for i, row in enumerate(sheet.sums(bounds))
        ]

    def _crossing(self, begin: Indices) -> tuple[Indices, Indices]:
        """Bytes that stages keep of each micro-batch because they begin at these nodes, and for what passes to them."""
        x, boundary = self.layout, self.table.boundary
        crosses = self.table.structure.live_values[begin]
        times = (memory.RECEIVE_BUFFERS + (x.pp if self.profile.buffers.stage_output_saved else 0)) if x.pp > 1 else 0
        return boundary * crosses, times * boundary * np.maximum(1, crosses)

    def spare(self, bounds: StageBounds) -> list[int]:
        """The elements that each stage counts of weights that it, or an earlier stage of its rank, has already."""
        spare = [0] * (len(bounds) - 1)
        for (_, nodes), elements in zip(self.table.structure.shared_weights, self.table.shared, strict=True):
            seen: set[int] = set()
            for stage in stages_of(nodes, bounds):
                spare[stage] += elements * (stage % self.layout.pp in seen)
                seen.add(stage % self.layout.pp)
        return spare

    @cached_property
    def rooms(self) -> MemoryLimit:
        """What the ranks of a cut need. A weight that several nodes of a rank share is counted as often."""
        x, sheet = self.layout, self.table
        params, experts, saved = (
            sheet.runs(self.places, [c]) for c in (CostColumn.PARAMS, CostColumn.EXPERT_PARAMS, CostColumn.SAVED)
        )
        static, stepping = self._each
        state, step = (params.times(each[0]).plus(experts, each[1]) for each in (static, stepping))
        flights, backs = schedule.in_flight_moments(x.pp, x.vpp, self.microbatches, x.microbatch_group)
        comes = np.zeros(flights.shape[:2])
        comes[:, :backs], comes[-1, backs:] = sheet.workspace, sheet.loss
        received, passed = (ALLOCATED * nbytes.astype(float) for nbytes in self._crossing(self.places))
        return MemoryLimit(
            state=state,
            stepping=state.plus(step, ALLOCATED),
            saved=saved.times(ALLOCATED),
            flights=flights,
            comes=ALLOCATED * comes,
            received=received,
            passed=passed,
            beside=memory.reserved_bytes(x, self.cluster, self.profile) + ALLOCATED * sheet.library,
            room=capacity(self.cluster, self.headroom),
            element=(static[0], static[0] + ALLOCATED * stepping[0]),
        )

    @property
    def _each(self) -> tuple[list[float], list[float]]:
        """Bytes of each element of dense weights, and of experts': of the state, and of the optimizer's step."""
        n, x, precision, profile = 10**6, self.layout, self.workload.precision, self.profile
        alone = ((n, 0), (0, n))
        static = [sum(memory.state_bytes(*of, x, precision, profile).values()) / n for of in alone]
        return static, [memory.optimizer_step_bytes(*of, x, profile) / n for of in alone]


@frozen(eq=False, slots=False)
class Partition:
    """A layout whose stages have a place: what each pipeline rank then holds."""

    problem: PartitionProblem
    bounds: StageBounds

    @property
    def layout(self) -> Layout:
        """The layout that is placed."""
        return self.problem.layout

    @property
    def capacity(self) -> int:
        """Bytes of a device that may be filled."""
        return capacity(self.problem.cluster, self.problem.headroom)

    @cached_property
    def parts(self) -> list[StageMemory]:
        """What each stage holds."""
        return self.problem.parts(self.bounds)

    @cached_property
    def rank_peaks(self) -> tuple[memory.Peak, ...]:
        """The memory of each pipeline rank at its fullest."""
        layout, m, precision = self.layout, self.problem.microbatches, self.problem.workload.precision
        beside = memory.reserved_bytes(layout, self.problem.cluster, self.problem.profile)
        ranks = range(layout.pp)
        profile = self.problem.profile
        return tuple(
            memory.rank_peak(self.parts[r :: layout.pp], r, layout, m, precision, beside, profile) for r in ranks
        )

    @property
    def peaks(self) -> tuple[int, ...]:
        """The bytes that each pipeline rank holds at its fullest."""
        return tuple(peak.nbytes for peak in self.rank_peaks)

    @cached_property
    def deficit(self) -> int:
        """Bytes that the fullest rank lacks; negative when there is room."""
        return int(self._needed.max()) - self.capacity

    @property
    def _needed(self) -> Vector:
        """The bytes of each pipeline rank at its fullest: those of `fullest`, to a few bytes, and sooner."""
        fit, x = self.problem, self.layout
        twice = np.array(fit.spare(self.bounds)).reshape(x.vpp, x.pp).sum(axis=0)
        needed: Vector = fit.rooms.needed(fit.cut(self.bounds)[None], twice)[0]
        return needed

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory for its stages."""
        return self.deficit <= 0

    def roomy(self) -> Partition:
        """The same layout cut to fit the memory if that can be, and to be quick; `self` is its most even cut."""
        bounds = self.problem.roomy(self.bounds)
        return self if bounds is None else Partition(self.problem, bounds)

    @cached_property
    def sums(self) -> Rows:
        """What each stage costs for a micro-batch: [stages, columns]."""
        return self.problem.table.sums(self.bounds)

    @property
    def seconds(self) -> list[float]:
        """Those of a micro-batch through each stage, both ways."""
        seconds: list[float] = self.sums[:, STEP_COLUMNS].sum(axis=1).tolist()
        return seconds


def stages_of(nodes: tuple[int, ...], bounds: StageBounds) -> list[int]:
    """The stage of each of these nodes."""
    return [bisect_right(bounds, node) - 1 for node in nodes]
