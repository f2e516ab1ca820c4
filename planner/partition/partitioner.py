"""Partition of a layout into pipeline stages: balanced in time, within the memory limit.

`partition(layout, table, memory_limit)` does all of it. A `PartitionProblem` is a layout with its cost table and the
limit, a `Partition` that and the stage boundaries: graph node numbers, one more than stages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Rows
from megaloom.planner.cost import communication, memory
from megaloom.planner.cost.columns import STEP_COLUMNS, CostColumn
from megaloom.planner.cost.cost_table import CostTable
from megaloom.planner.cost.job import Job
from megaloom.planner.cost.memory import StageMemory
from megaloom.planner.pipeline import schedules

from .dynamic_program import (
    TOLERANCE,
    ChainBatch,
    Indices,
    SegmentSums,
    balance,
    balance_all,
)
from .local_search import (
    SLOWEST_FACTOR,
    level_ranks,
    level_within_limit,
    partition_within_limit,
)
from .memory_limit import MemoryLimit

HEADROOM = 0.05  # share of a device's memory that a plan leaves free: a nearly full allocator stalls
WHOLE_BLOCKS = 1.001  # factor by which the slowest stage may be slower if all stages then have whole blocks

StageBounds = tuple[int, ...]


def capacity(cluster: Cluster, headroom: float = HEADROOM) -> int:
    """Return the memory limit: the bytes of a device that a plan may use."""
    return int(cluster.device.nbytes * (1 - headroom))


@frozen(eq=False, slots=False)
class PartitionProblem:
    """A layout to partition into stages: its cost table, and the memory limit in bytes."""

    layout: Layout
    table: CostTable
    memory_limit: int
    whole_blocks: bool = False  # stages begin and end between blocks

    @property
    def job(self) -> Job:
        """Return the model, workload, cluster and framework profile."""
        return self.table.job

    @property
    def microbatches(self) -> int:
        """Return the micro-batches of one step on each data-parallel copy."""
        return self.layout.microbatches(self.job.workload.batch)

    @cached_property
    def cut_points(self) -> Indices:
        """Return the graph nodes at which a stage may begin or end."""
        return self.table.structure.block_cut_points if self.whole_blocks else self.table.structure.cut_points

    @cached_property
    def seconds(self) -> SegmentSums:
        """Return the seconds of one micro-batch, forward and backward, of every stage."""
        return self.segment_sums(STEP_COLUMNS)

    def segment_sums(self, columns: Sequence[int]) -> SegmentSums:
        """Return the sum of these columns of every stage."""
        table, cuts = self.table, self.cut_points
        key = (len(cuts), *columns)
        if key not in table.known_sums:
            rows = table.rows[:, columns].sum(axis=1)[table.structure.kind_of_node]
            sums = np.concatenate([[0.0], np.cumsum(rows)])[cuts]
            if table.recompute_rows is None:
                table.known_sums[key] = SegmentSums(sums)
            else:
                extra = table.recompute_before[:, columns].sum(axis=1)
                stop = table.structure.recompute_end(table.recompute_blocks)[cuts]
                last = np.searchsorted(cuts, stop, side="right") - 1
                table.known_sums[key] = SegmentSums(sums, extra[cuts], extra[stop], last)
        found: SegmentSums = table.known_sums[key]
        return found

    def within_limit(self, even: StageBounds) -> StageBounds | None:
        """Return a partition that fits, with a fast slowest stage; None if none is found. `even` is balanced."""
        cuts = self.cut_points.searchsorted(even)
        found: Sequence[int] | Indices | None
        if self.layout.vpp == 1:
            found = balance(self.seconds, self.layout.pp, self.limits.latest_ends)
        elif self.limits.deficit(cuts[None])[0] <= 0:
            found = level_within_limit(self.seconds, cuts, self.limits)
        else:
            found = partition_within_limit(self.seconds, cuts, self.limits)
        return None if found is None else tuple(self.cut_points[np.asarray(found)].tolist())

    def feasible(self, even: StageBounds) -> bool:
        """Return False only if no partition fits, counting shared weights in each stage. `even` is balanced."""
        if self.layout.vpp == 1:
            return self.limits.feasible
        cuts = self.cut_points.searchsorted(even)
        slowest = float(self.seconds(cuts[:-1], cuts[1:]).max())
        return not self.limits.infeasible_under(self.seconds, SLOWEST_FACTOR * slowest)

    @cached_property
    def limits(self) -> MemoryLimit:
        """Return the memory of every stage against the limit. Each stage counts the weights that it shares."""
        x, job, table = self.layout, self.job, self.table
        columns = (CostColumn.PARAMS, CostColumn.EXPERT_PARAMS, CostColumn.SAVED)
        params, experts, saved = (self.segment_sums([column]) for column in columns)
        n, precision, profile = 10**6, job.workload.precision, job.profile
        elements = ((n, 0), (0, n))
        state = [sum(memory.state_bytes(*of, x, precision, profile).values()) / n for of in elements]
        step = [memory.optimizer_step_bytes(*of, x, profile) / n for of in elements]
        in_flight, transient = self.moments
        received, buffers = self.p2p_bytes(self.cut_points)
        state_sums, step_sums = (each[0] * params + each[1] * experts for each in (state, step))
        reserved = communication.reserved_bytes(x, job.cluster, profile)
        return MemoryLimit(
            state=state_sums,
            at_step=memory.rank_memory(state_sums, 0 * saved, 0, step_sums),
            saved=memory.rank_memory(0 * saved, saved, 1, 0),
            in_flight=in_flight,
            transient=memory.rank_memory(0, 0, 0, transient),
            received=memory.rank_memory(0, received.astype(float), 1, 0),
            receive_buffers=memory.rank_memory(0, 0, 0, buffers.astype(float)),
            fixed=memory.rank_memory(reserved, 0, 0, table.library),
            limit=self.memory_limit,
        )

    @cached_property
    def moments(self) -> tuple[Rows, Rows]:
        """Return the micro-batches in flight [ranks, moments, chunks], and transient bytes [ranks, moments]."""
        x, table = self.layout, self.table
        in_flight, backwards = schedules.in_flight_moments(x.pp, x.vpp, self.microbatches, x.microbatch_group)
        transient = np.zeros(in_flight.shape[:2])
        transient[:, :backwards], transient[-1, backwards:] = table.workspace, table.loss
        return in_flight, transient

    def p2p_bytes(self, begin: Indices) -> tuple[Indices, Indices]:
        """Return the bytes that a stage that begins at each node saves of its input, and those of p2p buffers."""
        x, boundary = self.layout, self.table.boundary
        live = self.table.structure.live_values[begin]
        copies = (
            (memory.RECEIVE_BUFFERS + (x.pp if self.job.profile.buffers.stage_output_saved else 0)) if x.pp > 1 else 0
        )
        return boundary * live, copies * boundary * np.maximum(1, live)

    def repeated_elements(self, bounds: StageBounds) -> list[int]:
        """Return the elements that each stage counts of weights that it, or an earlier stage of its rank, has too."""
        repeated = [0] * (len(bounds) - 1)
        for (_, nodes), elements in zip(self.table.structure.shared_weights, self.table.shared_elements, strict=True):
            seen: set[int] = set()
            for stage in stages_of(nodes, bounds):
                repeated[stage] += elements * (stage % self.layout.pp in seen)
                seen.add(stage % self.layout.pp)
        return repeated


@frozen(eq=False, slots=False)
class Partition:
    """A layout with its stages."""

    problem: PartitionProblem
    bounds: StageBounds

    @property
    def layout(self) -> Layout:
        """Return the layout."""
        return self.problem.layout

    @cached_property
    def stage_sums(self) -> Rows:
        """Return the costs of each stage for one micro-batch: [stages, columns]."""
        return self.problem.table.stage_sums(self.bounds)

    @property
    def seconds(self) -> list[float]:
        """Return the seconds of one micro-batch through each stage, forward and backward."""
        return [float(seconds) for seconds in self.stage_sums[:, STEP_COLUMNS].sum(axis=1)]

    @cached_property
    def stages(self) -> list[StageMemory]:
        """Return the memory of each stage. A weight that several nodes of a rank share is there once."""
        table, last = self.problem.table, len(self.bounds) - 2
        return [
            StageMemory(params, experts, saved, table.workspace, library, table.loss if i == last else 0)
            for i, (params, experts, saved, library) in enumerate(self._sizes.tolist())
        ]

    @cached_property
    def _sizes(self) -> NDArray[np.int64]:
        """Return elements of weights, of experts, saved bytes, and bytes of libraries and buffers: [stages, 4]."""
        sums, table = self.stage_sums, self.problem.table
        received, buffers = self.problem.p2p_bytes(np.array(self.bounds[:-1]))
        out = np.empty((len(sums), 4), dtype=np.int64)
        out[:, :3] = sums[:, [CostColumn.PARAMS, CostColumn.EXPERT_PARAMS, CostColumn.SAVED]]
        out[:, 0] -= self.problem.repeated_elements(self.bounds)
        out[:, 2] += received
        out[:, 3] = table.library + buffers
        return out

    @cached_property
    def rank_peaks(self) -> tuple[memory.Peak, ...]:
        """Return the peak memory of each pipeline rank."""
        x, job, peaks = self.layout, self.problem.job, []
        reserved = communication.reserved_bytes(x, job.cluster, job.profile)
        for rank in range(x.pp):
            moments = schedules.rank_moments(rank, x.pp, x.vpp, self.problem.microbatches, x.microbatch_group)
            stages = self.stages[rank :: x.pp]
            peaks.append(memory.rank_peak(stages, moments, x, job.workload.precision, reserved, job.profile))
        return tuple(peaks)

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """Return the peak bytes of each pipeline rank: the sums of `rank_peaks`, all ranks at once."""
        x, job, profile = self.layout, self.problem.job, self.problem.job.profile
        in_flight, transient = self.problem.moments
        params, experts, saved, library = self._sizes.T.reshape(4, x.vpp, x.pp)
        params, experts = params.sum(axis=0), experts.sum(axis=0)
        ranks, moments = transient.shape
        kept, fleeting = np.zeros((2, ranks, moments + 1))  # the last moment is the optimizer's step
        kept[:, :-1] = (in_flight @ saved.T[..., None])[..., 0]
        fleeting[:, :-1], fleeting[:, -1] = transient, memory.optimizer_step_bytes(params, experts, x, profile)
        fleeting += library.max(axis=0)[:, None]
        allocator, graphs = memory.ALLOCATOR * (kept + fleeting), profile.buffers.graph_pool_share * kept
        held = (kept + fleeting + np.trunc(allocator) + np.trunc(graphs)).max(axis=1)
        state = sum(memory.state_bytes(params, experts, x, job.workload.precision, profile).values())
        reserved = communication.reserved_bytes(x, job.cluster, profile)
        return tuple((state + held.astype(np.int64) + reserved).tolist())

    @property
    def deficit(self) -> int:
        """Return the bytes that the fullest rank needs beyond the memory limit; negative if it fits."""
        return max(self.peaks) - self.problem.memory_limit

    @property
    def fits(self) -> bool:
        """Return True if every rank stays within the memory limit."""
        return self.deficit <= 0


def partition(layout: Layout, table: CostTable, memory_limit: int) -> Partition:
    """Return the stages of a legal layout: balanced, and within the memory limit if a partition fits."""
    problem = PartitionProblem(layout, table, memory_limit)
    return refine(Partition(problem, balanced(problem)))


def refine(
    even: Partition,
    balance_stages: Callable[[PartitionProblem], StageBounds] | None = None,
    level_chunks: Callable[[PartitionProblem, StageBounds], StageBounds] | None = None,
) -> Partition:
    """Return the partition that is simulated, from the balanced one.

    It has whole blocks if such a partition fits and its slowest stage is hardly slower (WHOLE_BLOCKS). If `even` does
    not fit, it is balanced within the limit. Interleaved chunks are levelled between ranks. The two functions stand
    for `balanced` and `levelled`; a search gives versions that remember.
    """
    chosen, problem = even, evolve(even.problem, whole_blocks=True)
    slowest, segments = WHOLE_BLOCKS * max(even.seconds), len(problem.cut_points) - 1
    if len(even.bounds) - 1 <= segments:
        far = np.maximum.accumulate(problem.seconds.farthest(slowest * TOLERANCE)).tolist()
        end = 0
        for _ in range(len(even.bounds) - 1):  # the longest stages that take no longer
            end = far[end]
        if end == segments:
            blocks = Partition(problem, (balance_stages or balanced)(problem))
            if max(blocks.seconds) <= slowest and blocks.fits:
                chosen = blocks
    if chosen.layout.vpp == 1 and chosen.fits:
        return chosen
    if chosen.layout.vpp > 1:
        level = Partition(chosen.problem, (level_chunks or levelled)(chosen.problem, chosen.bounds))
        if level.fits:
            return level
    found = chosen.problem.within_limit(chosen.bounds)
    return chosen if found is None else Partition(chosen.problem, found)


def balanced(problem: PartitionProblem) -> StageBounds:
    """Return the balanced partition, whatever memory it takes. There must be enough cut points."""
    count = problem.layout.pp * problem.layout.vpp
    assert count < len(problem.cut_points), "more stages than the graph can be cut into"
    cuts = balance_all(ChainBatch.of([problem.seconds]), count)[0]
    return tuple(problem.cut_points[cuts].tolist())


def levelled(problem: PartitionProblem, even: StageBounds) -> StageBounds:
    """Return a partition into interleaved chunks whose ranks take about equal time, whatever memory it takes."""
    cuts = level_ranks(problem.seconds, problem.cut_points.searchsorted(even), problem.layout.pp)
    return tuple(problem.cut_points[cuts].tolist())


def stages_of(nodes: tuple[int, ...], bounds: StageBounds) -> list[int]:
    """Return the stage of each of these nodes."""
    return [bisect_right(bounds, node) - 1 for node in nodes]
