"""Partition of a layout into pipeline stages: balanced in time, within the memory limit.

`partition(problem)` does all of it. A `PartitionProblem` is a layout with its cost table and the limit, a `Partition`
that and the stage boundaries: graph node numbers, one more than stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Rows
from megaloom.planner.cost import communication, memory
from megaloom.planner.cost.columns import BACKWARD_COLUMNS, FORWARD_COLUMNS, STATE_COLUMNS, STEP_COLUMNS, CostColumn
from megaloom.planner.cost.cost_table import CostTable
from megaloom.planner.cost.job import Job
from megaloom.planner.cost.memory import StageMemory
from megaloom.planner.cost.weight_units import waiting_seconds
from megaloom.planner.pipeline import schedules
from megaloom.planner.pipeline.schedules import Moments
from megaloom.planner.rules.shared_weights import groups_of_copies

from .dynamic_program import TOLERANCE, Indices, SegmentSums, balance, balance_all
from .local_search import level_ranks, may_fit, partition_within_limit
from .memory_limit import MemoryLimit, StageSizes, memory_limit

WHOLE_BLOCKS = 1.001  # factor by which the slowest stage may be slower if all stages then have whole blocks

StageBounds = tuple[int, ...]


def segment_sums(table: CostTable, cuts: Indices, columns: Sequence[int]) -> SegmentSums:
    """Return the sum of these columns of every stage between two of these cut points."""
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
    known: SegmentSums = table.known_sums[key]
    return known


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

    @property
    def schedule(self) -> tuple[int, int, int, int]:
        """Return pp, vpp, micro-batches and microbatch group, on which the order of passes depends."""
        return self.layout.pp, self.layout.vpp, self.microbatches, self.layout.microbatch_group

    @cached_property
    def cut_points(self) -> Indices:
        """Return the graph nodes at which a stage may begin or end."""
        return self.table.structure.block_cut_points if self.whole_blocks else self.table.structure.cut_points

    @cached_property
    def seconds(self) -> SegmentSums:
        """Return the seconds of one micro-batch, forward and backward, of every stage."""
        return segment_sums(self.table, self.cut_points, STEP_COLUMNS)

    @property
    def balanced(self) -> StageBounds:
        """Return the balanced partition, whatever memory it takes. There must be enough cut points."""
        return tuple(self.cut_points[balance_all(self.seconds.alone, self.layout.pp * self.layout.vpp)[0]].tolist())

    def within_limit(self, even: StageBounds) -> StageBounds | None:
        """Return a partition that fits, with a fast slowest stage; None if none is found. `even` is balanced."""
        within: Sequence[int] | Indices | None
        if self.layout.vpp == 1:
            within = balance(self.seconds, self.layout.pp, self.limits.latest_ends)
        else:
            within = partition_within_limit(self.seconds, self.cut_points.searchsorted(even), self.limits)
        return None if within is None else tuple(self.cut_points[np.asarray(within)].tolist())

    def feasible(self, even: StageBounds) -> bool:
        """Return False only if no partition fits, counting shared weights in each stage. `even` is balanced."""
        return may_fit(self.seconds, self.cut_points.searchsorted(even), self.limits)

    @cached_property
    def limits(self) -> MemoryLimit:
        """Return the memory of every stage against the limit. Each stage counts the weights that it shares."""
        columns, cuts = (*STATE_COLUMNS, CostColumn.SAVED), self.cut_points
        params, experts, fixed, copies, saved = (segment_sums(self.table, cuts, [column]) for column in columns)
        received, buffers, moments = self.received[cuts], self.p2p_buffers[cuts], self.moments
        transient = self.table.workspace * moments.backward + self.table.loss * moments.loss
        library, ending = self.table.library, self.table.ending
        held = (params, experts, fixed, copies, saved)
        sizes = StageSizes(*held, moments.in_flight, transient, received, buffers, library, ending)
        return memory_limit(sizes, self.layout, self.job, self.memory_limit)

    @property
    def moments(self) -> Moments:
        """Return the moments of a step at which the memory of a rank may be largest."""
        return schedules.memory_moments(*self.schedule)

    @cached_property
    def received(self) -> Indices:
        """Return the bytes that a stage receives and saves, by the node where it begins: [nodes + 1]."""
        return self.table.boundary

    @cached_property
    def p2p_buffers(self) -> Indices:
        """Return the bytes of the p2p buffers of a stage, by the node where it begins: [nodes + 1]."""
        return (
            (self.layout.pp > 1)
            * (memory.RECEIVE_BUFFERS + self.layout.pp * self.job.profile.saved.stage_output)
            * np.maximum(self.table.least_boundary, self.received)
        )


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

    @cached_property
    def waiting(self) -> Rows:
        """Return the seconds for which passes of one micro-batch wait for sharded weights or gradients: [stages, 2]."""
        table = self.problem.table
        if table.units is None:
            return np.zeros((len(self.bounds) - 1, 2))
        by_node = waiting_seconds(table.rows, table.units, table.job, self.layout)[table.structure.kind_of_node]
        return np.add.reduceat(by_node, self.bounds[:-1])

    @property
    def seconds(self) -> list[float]:
        """Return the seconds of one micro-batch by stage, forward and backward, without waiting for sharded weights."""
        return [float(seconds) for seconds in self.stage_sums[:, STEP_COLUMNS].sum(axis=1)]

    @cached_property
    def forward_seconds(self) -> list[float]:
        """Return the seconds of one micro-batch by stage, forward."""
        return [float(seconds) for seconds in self.stage_sums[:, FORWARD_COLUMNS].sum(axis=1) + self.waiting[:, 0]]

    @cached_property
    def backward_seconds(self) -> list[float]:
        """Return the seconds of one micro-batch by stage, backward."""
        return [float(seconds) for seconds in self.stage_sums[:, BACKWARD_COLUMNS].sum(axis=1) + self.waiting[:, 1]]

    @cached_property
    def send_seconds(self) -> list[float]:
        """Return the seconds of the p2p send of one micro-batch from each stage to the next, either way."""
        x, job = self.layout, self.problem.job
        levels = communication.crossed_level(np.arange(x.pp), x, job.cluster).tolist()
        sends = [(n, levels[s % x.pp]) for s, n in enumerate(self.problem.received[list(self.bounds[1:-1])].tolist())]
        scattered = job.profile.overlap.scattered_sends
        known = {send: communication.send_seconds(*send, x, job.cluster, scattered=scattered) for send in {*sends}}
        return [known[send] for send in sends]

    @property
    def blocked_seconds(self) -> list[float]:
        """Return how long its own p2p sends keep each rank from computing in a step; 0 with several chunks a rank."""
        return [
            self.problem.microbatches * sum(self.send_seconds[max(0, rank - 1) : rank + 1]) * (self.layout.vpp == 1)
            for rank in range(self.layout.pp)
        ]

    @cached_property
    def stages(self) -> list[StageMemory]:
        """Return the memory of each stage."""
        return [
            StageMemory(
                *(dense, experts, fixed, copies, saved, self.problem.table.workspace, library),
                loss=self.problem.table.loss * (stop == self.bounds[-1]),
                ending=ending,
            )
            for stop, (dense, experts, fixed, copies, saved, library, ending) in zip(
                self.bounds[1:], self._sizes.tolist(), strict=True
            )
        ]

    @cached_property
    def _sizes(self) -> NDArray[np.int64]:
        """Return what `memory.rank_peaks` reads of each stage: [stages, 7].

        A weight that several nodes of a rank share is there once.
        """
        sums, problem, begin = self.stage_sums, self.problem, np.array(self.bounds[:-1])
        table = problem.table
        out = np.empty((len(sums), 7), dtype=np.int64)
        out[:, :5] = sums[:, [*STATE_COLUMNS, CostColumn.SAVED]]
        if table.shared_elements:
            repeated = table.structure.repeated_elements(table.shared_elements, self.bounds, self.layout.pp)
            out[:, 0], out[:, 2] = out[:, 0] - repeated[True], out[:, 2] - repeated[False]
        out[:, 4] += problem.received[begin]
        out[:, 5] = table.library + problem.p2p_buffers[begin]
        out[:, 6] = table.ending
        return out

    @property
    def rank_elements(self) -> NDArray[np.int64]:
        """Return the elements of trained dense weights and of experts that each pipeline rank holds: [ranks, 2]."""
        return np.asarray(self._sizes[:, :2].reshape(self.layout.vpp, self.layout.pp, 2).sum(axis=0))

    @property
    def rank_peaks(self) -> tuple[memory.Peak, ...]:
        """Return the peak memory of each pipeline rank."""
        return self._rank_peaks.each

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """Return the peak bytes of each pipeline rank."""
        return tuple(self._rank_peaks.nbytes.tolist())

    @cached_property
    def _rank_peaks(self) -> memory.RankPeaks:
        return memory.rank_peaks(
            *(self._sizes, self.problem.table.workspace, self.problem.table.loss, self.problem.moments),
            *(self.layout, self.problem.job, self.copy_groups if self.copies else 0),
        )

    @cached_property
    def copies(self) -> dict[int, tuple[int, ...]]:
        """Return the pipeline ranks that hold a copy of a trained weight, by its position in `shared_weights`."""
        return (
            self.problem.table.structure.copies(self.bounds, self.layout.pp)
            if self.problem.table.shared_elements
            else {}
        )

    @cached_property
    def copy_groups(self) -> NDArray[np.int64]:
        """Return the number of process groups by which each rank reduces gradients of copies of weights: [ranks]."""
        groups = groups_of_copies(self.copies.values(), self.layout.pp)
        return np.array([sum(rank in ranks for ranks in groups) for rank in range(self.layout.pp)])

    @property
    def deficit(self) -> int:
        """Return the bytes that the fullest rank needs beyond the memory limit; negative if it fits."""
        return max(self.peaks) - self.problem.memory_limit

    @property
    def fits(self) -> bool:
        """Return True if every rank stays within the memory limit."""
        return self.deficit <= 0


def levelled(problem: PartitionProblem, even: StageBounds) -> StageBounds:
    """Return a partition into interleaved chunks whose ranks take about equal time, whatever memory it takes."""
    cuts = level_ranks(problem.seconds, problem.cut_points.searchsorted(even), problem.layout.pp)
    return tuple(problem.cut_points[cuts].tolist())


def partition(
    problem: PartitionProblem,
    balance_stages: Callable[[PartitionProblem], StageBounds] = attrgetter("balanced"),
    even: Partition | None = None,
) -> Partition:
    """Return the stages of a legal layout: balanced, and within the memory limit if a partition fits.

    They are whole blocks if such a partition fits and its slowest stage is hardly slower (WHOLE_BLOCKS). Interleaved
    chunks are levelled between ranks. A search caches what `balance_stages` gives.
    """
    chosen = even = even or Partition(problem, balance_stages(problem))
    blocks = evolve(problem, whole_blocks=True)
    slowest, segments, count = WHOLE_BLOCKS * max(even.seconds), len(blocks.cut_points) - 1, len(even.bounds) - 1
    if count <= segments < len(problem.cut_points) - 1:  # else the balanced partition has whole blocks
        far, end = np.maximum.accumulate(blocks.seconds.farthest(slowest * TOLERANCE)).tolist(), 0
        for _ in range(count):  # the longest stages that take no longer
            end = far[end]
        if end == segments:
            whole = Partition(blocks, balance_stages(blocks))
            if max(whole.seconds) <= slowest and whole.fits:
                chosen = whole
    if chosen.layout.vpp == 1 and chosen.fits:
        return chosen
    if chosen.layout.vpp > 1:
        bounds = levelled(chosen.problem, chosen.bounds)
        level = chosen if bounds == chosen.bounds else Partition(chosen.problem, bounds)
        if level.fits:
            return level
    found = chosen.problem.within_limit(chosen.bounds)
    return chosen if found is None else Partition(chosen.problem, found)
