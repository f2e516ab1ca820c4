"""Partitions without interleaving that fit the memory limit: whether there is one, and how slow its slowest stage is.

Stages are filled one after the other, for many layouts at once, each as far as the memory and a time cap allow. If they
do not reach the end of the model, no partition fits under this cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from megaloom.planner.contract.layouts import Column, Layouts, Rows, alike
from megaloom.planner.cost import memory
from megaloom.planner.cost.columns import ELEMENTS, STEP_COLUMNS, CostColumn
from megaloom.planner.cost.cost_table import CostTable
from megaloom.planner.cost.job import Job
from megaloom.planner.cost.memory import ALLOCATED, RECEIVE_BUFFERS
from megaloom.planner.partition.dynamic_program import FloatVector, Indices
from megaloom.planner.partition.partitioner import segment_sums
from megaloom.planner.pipeline import schedules

from .interleaved_memory import SLACK

FACTORS = (1.05, 1.15, 1.3, 1.5, 1.75, 2.0)  # time caps, as multiples of the slowest balanced stage
ELEMENTS_AT_ONCE = 10**12  # of which bytes are counted: sharded bytes are whole numbers


@frozen(eq=False)
class SegmentCosts:
    """Costs of all segments before each cut point: [chains, cut points]. Those of a stage are differences.

    Where only the first blocks of a stage are recomputed, a stage from cut point i to j saves `recompute` of j less
    that of i in addition, or, beyond `last` of i, `recompute_end` of i less that of i.
    """

    seconds: Rows  # forward and backward, without recompute of the first blocks
    elements: Rows  # [3, chains, cut points] of trained dense, trained expert, and frozen weights
    saved: Rows  # bytes of saved activations of one micro-batch
    recompute: Rows
    recompute_end: Rows
    last: Indices

    @classmethod
    def of(cls, tables: Sequence[CostTable]) -> SegmentCosts:
        """Return the costs in these tables."""
        structure, points = tables[0].structure, len(tables[0].structure.cut_points)
        rows = np.array([table.rows for table in tables])
        columns = (rows[..., STEP_COLUMNS].sum(axis=2), *(rows[..., c] for c in (*ELEMENTS, CostColumn.SAVED)))
        sums = np.zeros((len(columns), len(tables), len(structure.kind_of_node) + 1))
        sums[..., 1:] = np.cumsum([column[:, structure.kind_of_node] for column in columns], axis=2)
        seconds, *elements, saved = sums[..., structure.cut_points]
        recompute, end = np.zeros((2, len(tables), points))
        last = np.full((len(tables), points), points - 1)
        for i, table in enumerate(tables):
            stages = segment_sums(table, np.array(structure.cut_points), [CostColumn.SAVED])
            if stages.extra is not None and stages.extra_end is not None and stages.last is not None:
                recompute[i], end[i], last[i] = stages.extra, stages.extra_end, stages.last
        return cls(seconds, np.array(elements), saved, recompute, end, last)

    def take(self, which: Column) -> SegmentCosts:
        """Return the costs of these chains."""
        names = ("seconds", "saved", "recompute", "recompute_end", "last")
        rows = {name: getattr(self, name)[which] for name in names}
        return evolve(self, **rows, elements=self.elements[:, which])


@frozen(eq=False)
class FilledStages:
    """Bytes of stages without interleaving, one a rank, and the bytes that each rank has free for its stage."""

    costs: SegmentCosts  # [layouts]
    state: Rows  # [layouts, cut points] weights, gradients, optimizer before each cut point
    at_step: Rows  # the same with the transient bytes of the optimizer's step
    in_flight: Rows  # [layouts, ranks] micro-batches
    free: Rows  # [layouts, ranks] for state and saved activations
    free_at_step: Rows  # [layouts, ranks]

    def reach_end(self, which: Column, caps: FloatVector) -> NDArray[np.bool_]:
        """Return whether stages of these layouts, filled in order and each under its time cap, have all segments."""
        costs, state, at_step = self.costs.take(which), self.state[which], self.at_step[which]
        in_flight, free, free_at_step = self.in_flight[which], self.free[which], self.free_at_step[which]
        points, partial = state.shape[1], bool(costs.recompute.any())
        rows, here, done = np.arange(len(which)), np.arange(points), np.zeros(len(which), dtype=np.intp)
        for rank in range(in_flight.shape[1]):
            n = ALLOCATED * in_flight[:, rank]
            live = state + n[:, None] * costs.saved
            before = live[rows, done]
            if partial:
                last, end = costs.last[rows, done][:, None], costs.recompute_end[rows, done][:, None]
                live += n[:, None] * np.where(here <= last, costs.recompute, end)
                before += n * costs.recompute[rows, done]
            fits = live <= (before + free[:, rank])[:, None]
            fits &= at_step <= (at_step[rows, done] + free_at_step[:, rank])[:, None]
            fits &= costs.seconds <= (costs.seconds[rows, done] + caps)[:, None]
            fits[:, 0] = True
            done = np.maximum(done, points - 1 - fits[:, ::-1].argmax(axis=1))
            if (done == points - 1).all():
                break
        return np.asarray(done == points - 1)


def slowest_within_limit(
    x: Layouts,
    tables: Sequence[CostTable],
    which: Column,
    slowest: FloatVector,
    runtime_nbytes: FloatVector,
    job: Job,
    limit: float,
) -> FloatVector:
    """Return a lower bound of the slowest stage of every partition that fits, infinite if none fits: [layouts].

    All layouts have pp ranks of one chunk. which: the cost table of each; slowest: seconds of the slowest stage of each
    balanced partition. No weight may be shared by two nodes.

    Bound: for each c of FACTORS, if stages that are filled greedily under the cap c t do not reach the last cut point,
    every partition that fits has a stage slower than c t. A stage holds no more if it begins later or ends sooner. So
    by induction no partition that fits is ahead of the greedy stages at any boundary.
    """
    first, rows = alike(which)
    costs = SegmentCosts.of([tables[i] for i in which[first].tolist()]).take(rows)
    filled = _filled_stages(x, costs, [tables[i] for i in which.tolist()], runtime_nbytes, job, limit)
    fits = filled.reach_end(np.arange(len(x)), np.full(len(x), inf))
    least = np.where(fits, slowest, inf)
    some = np.flatnonzero(fits)
    caps = np.multiply.outer(FACTORS, slowest[some])
    reached = filled.reach_end(np.tile(some, len(FACTORS)), SLACK * caps.ravel()).reshape(caps.shape)
    least[some] = np.where(reached, 0.0, caps).max(axis=0, initial=0.0)
    return np.maximum(least, slowest)


def _filled_stages(
    x: Layouts, costs: SegmentCosts, tables: Sequence[CostTable], runtime_nbytes: FloatVector, job: Job, limit: float
) -> FilledStages:
    """Return what the stages of these layouts hold; `tables` and `runtime_nbytes` have one entry for each."""
    n, profile, pp = ELEMENTS_AT_ONCE, job.profile, int(x.pp[0])
    ones, none = np.full(len(x), n), np.zeros(len(x), dtype=np.int64)
    kinds = ((ones, none, none), (none, ones, none), (none, none, ones))
    states = [memory.rank_state(a, b, x, job, c) for a, b, c in kinds]
    state = sum(part.total[:, None] / n * each for part, each in zip(states, costs.elements, strict=True))
    step = sum(part.step[:, None] / n * each for part, each in zip(states, costs.elements, strict=True))
    names = ("workspace", "library", "loss", "least_boundary")
    workspace, library, loss, received = np.array([[getattr(t, name) for name in names] for t in tables], dtype=float).T
    first = np.array([table.boundary[0] for table in tables], dtype=float)
    in_flight = schedules.first_in_flight(pp, 1, x.microbatches(job.workload.batch), x.microbatch_group)[:, 0]
    entering = np.where(np.arange(pp), received[:, None], first[:, None])  # [layouts, ranks]
    passes = RECEIVE_BUFFERS + pp * profile.saved.stage_output if pp > 1 else 0
    buffers = passes * np.maximum(entering, received[:, None]) + library[:, None]
    free = SLACK * limit - runtime_nbytes[:, None] - ALLOCATED * buffers
    transient = np.repeat(workspace[:, None], pp, axis=1)
    transient[:, -1] = np.maximum(workspace, loss)
    return FilledStages(
        costs=costs,
        state=state,
        at_step=state + ALLOCATED * step,
        in_flight=in_flight.astype(float),
        free=free - ALLOCATED * (transient + in_flight * entering),
        free_at_step=free,
    )
