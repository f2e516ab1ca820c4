"""Peak memory of each pipeline rank for a partition, and whether the partition fits the memory limit. Arrays only.

`memory_limit` makes a `MemoryLimit`, which computes it for many partitions at once, gives the exact limit on a stage
where a rank has one, and tells when no partition can fit. A partition is an array of cut points; stage s is chunk
s // ranks of rank s % ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from attrs import evolve, frozen

from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Rows
from megaloom.planner.cost import communication, memory
from megaloom.planner.cost.job import Job

from .dynamic_program import (
    TOLERANCE,
    FloatVector,
    Indices,
    SegmentSums,
    boundary_ranges,
)

HEADROOM = 0.05  # share of a device's memory that a plan leaves free: a nearly full allocator stalls
FULLEST = 4  # moments of a rank by which similar partitions are compared


def capacity(cluster: Cluster, headroom: float = HEADROOM) -> int:
    """Return the memory limit: the bytes of a device that a plan may use."""
    return int(cluster.device.nbytes * (1 - headroom))


@frozen(eq=False)
class StageSizes:
    """Elements and bytes of each stage between two cut points, before the allocator's reserve."""

    params: SegmentSums  # elements of trained dense weights
    expert_params: SegmentSums  # elements of trained expert weights
    frozen_params: SegmentSums  # elements of weights that are not trained
    narrow_copies: SegmentSums  # bytes of copies of weights in 8 bits
    saved: SegmentSums  # bytes of saved activations of one micro-batch
    in_flight: Rows  # [ranks, moments, chunks] micro-batches in flight
    transient: Rows  # [ranks, moments] bytes
    received: Indices  # [cut points] bytes that a stage that begins there receives and saves
    buffers: Indices  # [cut points] bytes of the p2p buffers of a stage that begins there
    library: int  # bytes that libraries hold
    ending: int = 0  # transient bytes at the end of the last backward pass


@frozen(eq=False, slots=False)
class MemoryLimit:
    """Memory of each stage between two cut points, and the limit. All sizes are bytes.

    `rank_memory` is linear in its terms. Each field is `rank_memory` of one term alone; a rank's memory is their sum.
    """

    state: SegmentSums  # weights, gradients, optimizer
    at_step: SegmentSums  # the state, and transient bytes of the optimizer's step; nothing is in flight then
    saved: SegmentSums  # saved activations of one micro-batch
    in_flight: Rows  # [ranks, moments, chunks] micro-batches in flight
    transient: Rows  # [ranks, moments]
    received: FloatVector  # [cut points] saved activations of one micro-batch that enter a stage that begins there
    receive_buffers: FloatVector  # [cut points] of a stage that begins there; a rank has the largest of its chunks'
    fixed: float  # libraries, and what no tensor holds
    limit: float  # bytes of each rank
    ending: float = 0.0  # what each rank holds beside `at_step`, at the end of the last backward pass

    @property
    def ranks(self) -> int:
        """Return the number of pipeline ranks."""
        return len(self.in_flight)

    @property
    def chunks(self) -> int:
        """Return the number of chunks of a rank."""
        return int(self.in_flight.shape[2])

    def at_fullest_moments(self, cuts: Indices) -> MemoryLimit:
        """Return the limit at the fullest moments of this partition only, the fullest first. It is faster to compute.

        A partition that differs much from this one may be fuller at other moments.
        """
        saved = self._saved(cuts[:-1], cuts[1:]).reshape(self.chunks, self.ranks)
        activations = np.einsum("rmc,cr->rm", self.in_flight, saved) + self.transient
        fullest = np.argsort(-activations, axis=1, kind="stable")[:, :FULLEST]
        in_flight = np.take_along_axis(self.in_flight, fullest[:, :, None], axis=1)
        return evolve(self, in_flight=in_flight, transient=np.take_along_axis(self.transient, fullest, axis=1))

    def rank_peaks(self, cuts: Indices) -> Rows:
        """Return the peak bytes of each rank: partitions [partitions, boundaries] -> [partitions, ranks]."""
        start, end = cuts.T[:-1], cuts.T[1:]  # numpy is fast along the last axis
        if self.state.extra is None:
            stages = self._before_end.take(end, axis=1)
            stages -= self._before_start.take(start, axis=1)
        else:
            stages = np.array([self.state(start, end), self.at_step(start, end), self._saved(start, end)])
        stages = stages.reshape(3, self.chunks, self.ranks, -1)
        buffers: Rows | float = float(self.receive_buffers[0])
        if self._buffers_differ:
            buffers = self.receive_buffers[start].reshape(stages.shape[1:]).max(axis=0)
        state, at_step = stages[:2].sum(axis=1)
        activations = (self.in_flight @ stages[2].transpose(1, 0, 2) + self.transient[..., None]).max(axis=1)
        peaks: Rows = (np.maximum(state + activations, at_step + self.ending) + buffers + self.fixed).T
        return peaks

    @cached_property
    def _before_end(self) -> Rows:
        """State, memory at the step, and saved bytes before each cut point where a stage ends: [3, cut points]."""
        return np.array([self.state.sums, self.at_step.sums, self.saved.sums])

    @cached_property
    def _before_start(self) -> Rows:
        """Bytes as in `_before_end` before each cut point where a stage begins, less what it receives."""
        return np.array([self.state.sums, self.at_step.sums, self.saved.sums - self.received])

    @cached_property
    def _buffers_differ(self) -> bool:
        return bool(self.receive_buffers.max() > self.receive_buffers[0])

    def _saved(self, start: Indices, end: Indices) -> FloatVector:
        """Return the saved activations of one micro-batch of the stages between these cut points."""
        if self.saved.extra is None:
            return self.saved.sums[end] - (self.saved.sums - self.received)[start]
        return self.saved(start, end) + self.received[start]

    def deficit(self, cuts: Indices) -> FloatVector:
        """Return the sum over ranks of max(0, peak / limit - 1) of each partition: 0 if it fits."""
        deficits: FloatVector = np.maximum(self.rank_peaks(cuts) / (self.limit * TOLERANCE) - 1, 0).sum(axis=1)
        return deficits

    def latest_ends(self, k: int) -> Indices:
        """Return where stage k must end, for each cut point where it may begin, if each rank has one stage. Exact."""
        ends: Indices = np.minimum.reduce([memory.farthest(limit) for memory, limit in self._alone(k)])
        return ends[:-1]

    @property
    def equal_share_ends(self) -> Indices:
        """Return where each stage must end if a rank's chunks share its memory equally: [stages, cut points].

        Of a rank's moments it sees the first.
        """
        share = (self.limit - self.fixed - self.receive_buffers) / self.chunks
        moments = list(
            zip(self.in_flight[:, 0].T.ravel().tolist(), self.transient[:, 0].tolist() * self.chunks, strict=True)
        )
        ends = {
            (n, transient): (self.state + n * self.saved).farthest(share - transient / self.chunks - n * self.received)
            for n, transient in {*moments}
        }
        latest: Indices = np.minimum(
            [ends[moment] for moment in moments], self.at_step.farthest(share - self.ending / self.chunks)
        )
        return latest[:, :-1]

    @property
    def feasible(self) -> bool:
        """Return True if a partition fits, where each rank has one stage, which may be empty. Exact.

        Stages are filled greedily: the first begins with an empty receive buffer, each other one with the smallest.
        """
        done, size, limit = 0, len(self.state), self.limit * TOLERANCE - self.fixed
        smallest = 1 + int((self.received + self.receive_buffers)[1:].argmin())
        each_rank = zip(self.in_flight[:, :, 0].tolist(), self.transient.tolist(), strict=True)
        for k, (in_flight, transient) in enumerate(each_rank):
            begin = smallest if k else 0
            free, received = limit - float(self.receive_buffers[begin]), float(self.received[begin])
            ends = [self.at_step.farthest_from(done, free - self.ending)]
            for n, nbytes in {*zip(in_flight, transient, strict=True)} - {(0.0, 0.0)}:
                ends.append((self.state + n * self.saved).farthest_from(done, free - nbytes - n * received))
            done = min(ends)
            if done == size:
                return True
        return False

    def _alone(self, k: int) -> list[tuple[SegmentSums, FloatVector]]:
        """Return the memory of rank k's only stage at its fullest moments, and the limit less its fixed memory."""
        free = self.limit * TOLERANCE - self.fixed - self.receive_buffers
        moments = {*zip(self.in_flight[k, :, 0].tolist(), self.transient[k].tolist(), strict=True)}
        most = [a for a in moments if not any(a != b and a[0] <= b[0] and a[1] <= b[1] for b in moments)]
        live = [(self.state + n * self.saved, free - transient - n * self.received) for n, transient in most]
        return [(self.at_step, free - self.ending), *live]

    def infeasible_under(self, seconds: SegmentSums, cap: float) -> bool:
        """Return True only if no partition fits whose stages take at most `cap` seconds.

        Under the time cap every boundary has an earliest and a latest cut point, hence each stage a least and a most
        memory. For each r, the ranks 0..r hold at least the state and the saved activations that the other ranks
        cannot hold, where saved activations count with the fewest in flight. If that exceeds (r + 1) limits, or if the
        least memory of one rank exceeds the limit, nothing fits.
        """
        far = np.maximum.accumulate(seconds.farthest(cap))
        bounds = boundary_ranges(far, self.chunks * self.ranks)
        if bounds is None:
            return True
        (least, most), (least_saved, most_saved) = _stage_ranges((self.state, self.saved), far, *bounds)
        stage_rank, ranks = np.arange(self.chunks * self.ranks) % self.ranks, np.arange(self.ranks)
        moment = self.in_flight.sum(axis=2).argmax(axis=1)
        in_flight = self.in_flight[ranks, moment].T.ravel()
        received = np.where(np.arange(len(stage_rank)), self.received[1:].min(), self.received[0])
        live = np.bincount(stage_rank, received * in_flight) + self.transient[ranks, moment]
        fixed = live + self.fixed + self.receive_buffers.min()
        state, saved = (_total(held, len(stage_rank)) for held in (self.state, self.saved))
        first = stage_rank <= ranks[:, None]  # [ranks, stages]: the stages of ranks 0..r
        held = np.maximum(first @ least, state - ~first @ most)
        activations = _least_weighted_sum(np.where(first, in_flight, 0), least_saved, most_saved, saved)
        if (held + activations + np.cumsum(fixed) > self.limit * TOLERANCE * (ranks + 1)).any():
            return True
        alone = np.bincount(stage_rank, least + in_flight * least_saved) + fixed
        return bool(alone.max() > self.limit * TOLERANCE)


def memory_limit(sizes: StageSizes, layout: Layout, job: Job, limit: float) -> MemoryLimit:
    """Return the memory of every stage against a limit in bytes."""
    n, profile = 10**6, job.profile
    params, experts, frozen = n * np.eye(3, dtype=np.int64)
    state = memory.rank_state(params, experts, layout, job, frozen)
    dense, expert, fixed = (state.total / n).tolist()
    state_sums = dense * sizes.params + expert * sizes.expert_params + fixed * sizes.frozen_params
    state_sums = state_sums + sizes.narrow_copies
    dense, expert, _ = (state.step / n).tolist()
    step_sums = dense * sizes.params + expert * sizes.expert_params
    copied = {nodes for slot, nodes in job.structure.shared_weights if slot.trained} if layout.pp > 2 else ()
    groups = len(copied) * job.cluster.outer.group_nbytes  # the most that a rank may need
    reserved = communication.reserved_bytes(layout, job.cluster, profile) + groups
    return MemoryLimit(
        state=state_sums,
        at_step=memory.rank_memory(state_sums, 0 * sizes.saved, 0, step_sums),
        saved=memory.rank_memory(0 * sizes.saved, sizes.saved, 1, 0),
        in_flight=sizes.in_flight,
        transient=memory.rank_memory(0, 0, 0, sizes.transient),
        received=memory.rank_memory(0, sizes.received.astype(float), 1, 0),
        receive_buffers=memory.rank_memory(0, 0, 0, sizes.buffers.astype(float)),
        ending=memory.rank_memory(0, 0, 0, sizes.ending),
        fixed=memory.rank_memory(reserved, 0, 0, sizes.library),
        limit=limit,
    )


def _stage_ranges(
    each: Sequence[SegmentSums], far: Indices, first: Indices, last: Indices
) -> list[tuple[FloatVector, FloatVector]]:
    """Return the least and the most that each stage holds between two possible boundaries, of each of these costs."""
    width = np.arange(int((last - first)[:-1].max()) + 1)
    start = np.minimum(first[:-1, None] + width, last[:-1, None])
    nearest, furthest = np.maximum(start + 1, first[1:, None]), np.minimum(far.take(start), last[1:, None])
    return [(held(start, nearest).min(axis=1), held(start, furthest).max(axis=1)) for held in each]


def _total(held: SegmentSums, count: int) -> float:
    """Return the least that `count` stages hold together. The first segments of a stage may hold less than others."""
    total = float(held.sums[-1])
    if held.extra is None or held.extra_end is None:
        return total
    return total + max(min(0.0, float(held.extra[-1])), count * min(0.0, float((held.extra_end - held.extra).min())))


def _least_weighted_sum(weights: Rows, least: FloatVector, most: FloatVector, total: float) -> FloatVector:
    """Return, by row of weights, the least weighted sum of parts between `least` and `most` that add up to a total."""
    order = np.argsort(weights, axis=1, kind="stable")
    rest = max(0.0, total - float(least.sum()))
    more = np.minimum(np.cumsum((most - least)[order], axis=1), rest)
    more[:, 1:] -= more[:, :-1].copy()
    sums: FloatVector = weights @ least + (np.sort(weights, axis=1) * more).sum(axis=1)
    return sums
