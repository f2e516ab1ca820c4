"""The price of one layout: seconds of a step by cause, bytes of each pipeline rank by holder.

`price_layout` is the pipeline: cost table, partition, simulation of one step. It has no caches; a search keeps what its
layouts share in `planner/search/pricing.py`. All times are seconds. The simulation leaves out the reading of data: a
device gets some 40 bytes of a token over PCIe while it computes, in a step of a million tokens for a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from attrs import frozen

from megaloom.dsl.dims import NBYTES, DType
from megaloom.dsl.facts.placement import INVARIANT, Transition
from megaloom.planner.contract.choices import Overlap
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Rows
from megaloom.planner.contract.plans import Prediction, Stage
from megaloom.planner.contract.state_placement import SHARDED, state_placements
from megaloom.planner.contract.workload import Precision
from megaloom.planner.cost import communication
from megaloom.planner.cost.columns import (
    STEP_COLUMNS,
    CostColumn,
)
from megaloom.planner.cost.communication import ProcessGroup
from megaloom.planner.cost.cost_table import cost_table
from megaloom.planner.cost.job import Job
from megaloom.planner.cost.measured_memory import needed_bytes, overflow_chance
from megaloom.planner.partition.partitioner import Partition, PartitionProblem, partition
from megaloom.planner.pipeline import schedules
from megaloom.planner.pipeline.timeline import Timeline, simulate_timeline

CAUSES = {  # columns of the time for which a pipeline rank computes
    "forward": [CostColumn.FORWARD],
    "backward": [CostColumn.BACKWARD],
    "recompute": [CostColumn.RECOMPUTE],
    "tensor-parallel communication": [CostColumn.TP_FORWARD, CostColumn.TP_BACKWARD],
    "context-parallel communication": [CostColumn.CP_FORWARD, CostColumn.CP_BACKWARD],
    "expert-parallel communication": [CostColumn.EP_FORWARD, CostColumn.EP_BACKWARD],
}
COPIED = 4 + 2  # bytes moved to make a 16-bit weight from its fp32 master weight
# Gradients are reduced in buckets, each as soon as it is complete, so that at least the last one is exposed: its
# elements, at least and by rank (megatron-core 0.16.1, distributed_data_parallel_config.py and
# distributed_data_parallel.py:115).
BUCKET, BUCKET_BY_RANK = 40_000_000, 1_000_000


@frozen
class EndOfStep:
    """Seconds of one pipeline rank after its last backward pass.

    All ranks wait for the last gradient reduction; then the rank with the slowest update ends the step.
    """

    reduction: float  # of gradients
    gathering: float  # of weights, which the distributed optimizer updates in shards
    tied: float  # of gradients of weights that several ranks share
    optimizer: float  # with the gradient norm, for which all ranks wait

    @property
    def reducing(self) -> float:
        """Return the seconds until all gradients of the rank are reduced."""
        return self.reduction + self.tied

    @property
    def updating(self) -> float:
        """Return the seconds from then until all weights of the rank are updated."""
        return self.optimizer + self.gathering


@frozen
class OverlapWindow:
    """Seconds of computation that can hide a rank's gradient reduction (backward) and weight gather (forward).

    That is the rank's last backward pass and its first forward pass. Gradients of interleaved chunks are complete one
    chunk after the other, so the passes of the last (first) microbatch group that follow (come before) count too.
    """

    backward: float = 0.0
    forward: float = 0.0


@frozen(eq=False, slots=False)
class Priced:
    """A layout with its partition and its prediction."""

    partition: Partition
    prediction: Prediction
    ends_of_step: tuple[EndOfStep, ...]  # by pipeline rank

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Return the stages of a plan."""
        placed, pp = self.partition, self.layout.pp
        return tuple(
            Stage(
                rank=i % pp,
                chunk=i // pp,
                start=placed.bounds[i],
                stop=placed.bounds[i + 1],
                forward_seconds=placed.forward_seconds[i],
                backward_seconds=placed.backward_seconds[i],
                params=stage.params + stage.expert_params + stage.frozen_params,
            )
            for i, stage in enumerate(placed.stages)
        )

    @cached_property
    def timeline(self) -> Timeline:
        """Return the start of every pass of every pipeline rank."""
        placed, x, m = self.partition, self.layout, self.partition.problem.microbatches
        seconds = placed.forward_seconds, placed.backward_seconds, placed.send_seconds
        return simulate_timeline(*seconds, x.pp, m, x.microbatch_group)

    @property
    def layout(self) -> Layout:
        """Return the layout."""
        return self.partition.layout

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return self.prediction.step_seconds


def price_layout(job: Job, layout: Layout, memory_limit: int) -> Priced:
    """Return the prediction of a legal layout, whether or not it fits the memory limit (bytes of a device)."""
    return simulate(partition(PartitionProblem(layout, cost_table(job, layout), memory_limit)))


def simulate(placed: Partition) -> Priced:
    """Return the prediction of a layout with its stages: the schedule event by event, then the end of the step.

    The breakdown is that of the pipeline rank that waits least.
    """
    x, job, m = placed.layout, placed.problem.job, placed.problem.microbatches
    seconds = placed.forward_seconds, placed.backward_seconds, placed.send_seconds
    last_backward = schedules.finish_times(*seconds, x.pp, m, x.microbatch_group)
    ends, blocked = ends_of_step(placed), placed.blocked_seconds
    counting = counting_seconds(placed) if job.repeats_forward else 0.0
    waiting, stage_seconds = placed.waiting.sum(axis=1), placed.stage_sums[:, STEP_COLUMNS].sum(axis=1)
    computing: Rows = m * (stage_seconds + waiting).reshape(x.vpp, x.pp).sum(axis=0)
    busy = [float(computing[r]) + blocked[r] + ends[r].reducing + ends[r].updating for r in range(x.pp)]
    end_of_last = end_of_ranks(last_backward, ends)
    busiest = max(range(x.pp), key=busy.__getitem__)
    peaks, columns, end = placed.rank_peaks, m * placed.stage_sums[busiest :: x.pp].sum(axis=0), ends[busiest]
    parts = {cause: float(columns[of].sum()) for cause, of in CAUSES.items()} | {
        "sharded-weight communication": m * float(waiting[busiest :: x.pp].sum()),
        "pipeline communication": blocked[busiest],
        "pipeline bubble": max(0.0, end_of_last - busy[busiest]) if x.pp > 1 else 0.0,
        "gradient communication": end.reduction + end.gathering,
        "tied-weight communication": end.tied,
        "optimizer": end.optimizer,
        "load of experts": counting,
    }
    step, (low, high) = sum(parts.values()), job.spread
    flops = job.flops / step / x.world
    prediction = Prediction(
        step_seconds=step,
        interval=(low * step, high * step),
        tokens_per_second_per_device=job.workload.tokens / step / x.world,
        flops_per_second_per_device=flops,
        mfu=flops / job.cluster.device.flops[job.workload.precision],
        bubble=parts["pipeline bubble"] / step,
        breakdown={cause: part for cause, part in parts.items() if part},
        nbytes=tuple(peak.held for peak in peaks),
        moments=tuple(peak.moment for peak in peaks),
        nbytes_high=float(max(needed_bytes(peak.held, job.memory_high) for peak in peaks)),
        overflow=max(overflow_chance(peak.held, job.cluster.device.nbytes, job.memory_high) for peak in peaks),
    )
    return Priced(placed, prediction, tuple(ends))


def end_of_ranks(last_backward: Iterable[float], ends: Sequence[EndOfStep]) -> float:
    """Return when the last of these ranks ends its step, given the ends of their last backward passes."""
    reduced = max(backward + end.reducing for backward, end in zip(last_backward, ends, strict=True))
    return reduced + max(end.updating for end in ends)


def counting_seconds(placed: Partition) -> float:
    """Return the seconds of the forward passes that count the load of experts over the batch.

    The first micro-batch passes all stages, then each other one takes as long as the slowest rank.
    """
    problem, pp = placed.problem, placed.layout.pp
    ranks = [sum(placed.forward_seconds[rank::pp]) for rank in range(pp)]
    return sum(ranks) + sum(placed.send_seconds) + (problem.microbatches - 1) * max(ranks)


def ends_of_step(placed: Partition) -> list[EndOfStep]:
    """Return the end of step of each pipeline rank."""
    x, job, each = placed.layout, placed.problem.job, [_before_end(placed, rank) for rank in range(placed.layout.pp)]
    # Most ranks in the middle of a model are alike.
    known = {(a, b, tied, window): end_of_step(a, b, tied, x, job, window) for a, b, tied, window in {*each}}
    return [known[before] for before in each]


def end_of_rank(placed: Partition, rank: int) -> EndOfStep:
    """Return the end of step of one pipeline rank."""
    params, experts, tied, window = _before_end(placed, rank)
    return end_of_step(params, experts, tied, placed.layout, placed.problem.job, window)


def _before_end(placed: Partition, rank: int) -> tuple[float, float, float, OverlapWindow]:
    """Return a rank's dense and expert elements, the seconds that reduce its tied weights, and its overlap window."""
    x, problem = placed.layout, placed.problem
    passes = (min(x.microbatch_group_size, problem.microbatches) * (x.vpp - 1) + 1) / x.vpp  # in the overlap window
    forward, backward = (sum(each[rank :: x.pp]) for each in (placed.forward_seconds, placed.backward_seconds))
    tied, table = 0.0, problem.table
    for i, ranks in placed.copies.items():
        if rank in ranks and len(ranks) > 1:
            stride = (max(ranks) - min(ranks)) // (len(ranks) - 1) * (x.world // x.pp)
            nbytes = problem.job.profile.optimizer.main_gradient_nbytes(x.grad_reduce) * table.shared_elements[i]
            part = nbytes, ProcessGroup(len(ranks), stride)
            tied += communication.collective_seconds("all_reduce", problem.job.cluster, part)
    params, experts = placed.rank_elements[rank].tolist()
    return params, experts, tied, OverlapWindow(passes * backward, passes * forward)


def end_of_step(
    params: float, experts: float, tied: float, layout: Layout, job: Job, window: OverlapWindow = OverlapWindow()
) -> EndOfStep:
    """Return the end of step of a rank with these elements of dense and expert weights.

    tied: seconds that reduce its tied weights. The gradient norm adds up one number over all devices, or over those of
    one copy of the model if each has all gradients (megatron-core 0.16.1, optimizer/clip_grads.py:
    get_grad_norm_fp32).
    """
    optimizer, precision, cluster = job.profile.optimizer, job.workload.precision, job.cluster
    sizes = ((params, communication.process_group("dp", layout)), (experts, communication.process_group("edp", layout)))
    dense_state, expert_state = state_placements(layout)
    parts = [(dense_state, [part for part in sizes if part[0]])]  # what moves at once
    if dense_state != expert_state:
        parts = [(state, [part]) for state, part in zip((dense_state, expert_state), sizes, strict=True) if part[0]]
    norm = [ProcessGroup(layout.world, 1)]
    if dense_state.optimizer == INVARIANT:
        norm = [communication.process_group(axis, layout) for axis in ("pp", "tp")]
    gradient = optimizer.main_gradient_nbytes(layout.grad_reduce)
    reduction = gathering = 0.0
    for state, of in parts:
        both = state.reduction, state.pass_reduction
        hidden = window.backward if layout.has_overlap(Overlap.GRADIENTS) else None
        reduction += _exposed_seconds(both, gradient, of, hidden, layout, job)
        both = state.gather, state.pass_gather
        hidden = window.forward if layout.has_overlap(Overlap.WEIGHTS) else None
        gathering += _exposed_seconds(both, precision.nbytes, of, hidden, layout, job)
    frees = layout.fsdp and job.frees_gradients
    moved = 0.0
    for state, count in ((dense_state, params / layout.dense_shards), (expert_state, experts / layout.expert_shards)):
        cast_in_gathers = frees and state.weights == SHARDED
        copied = 0 if precision is Precision.FP32 or cast_in_gathers else COPIED
        moved += (optimizer.moved_in_step_nbytes(layout.grad_reduce) + copied) * count
    moved += 0 if frees else gradient * (params + experts)  # set to zero
    number = NBYTES[DType.FLOAT32]
    waits = sum(communication.collective_seconds("all_reduce", cluster, (number, group)) for group in norm)
    if cluster.device.units > 1 and (params or experts):
        waits += job.profile.host.step_launches * cluster.device.launch_seconds
    return EndOfStep(reduction, gathering, tied, optimizer=moved / cluster.device.moves + waits)


def _exposed_seconds(
    transitions: tuple[Transition, Transition],
    nbytes: int,
    elements: Sequence[tuple[float, ProcessGroup]],
    hidden: float | None,
    layout: Layout,
    job: Job,
) -> float:
    """Return the seconds for which a step waits for a reduction of gradients, or a gather of weights.

    transitions: at the end of the step, and in each pass. nbytes: of an element. elements: by process group. hidden:
    seconds of computation that the collective overlaps with; None if it does not.
    """
    at_end, in_passes = (transition.communication for transition in transitions)
    whole = [(nbytes * n, group) for n, group in elements]
    last = [(nbytes * min(n, max(BUCKET, BUCKET_BY_RANK * group.size)), group) for n, group in elements]
    if at_end is None:  # nothing, or what the first or last pass of a step waits for
        return communication.state_collective_seconds(in_passes, job.cluster, layout, *last) if in_passes else 0.0
    if hidden is None:  # dense weights, then expert weights
        return sum(communication.state_collective_seconds(at_end, job.cluster, layout, part) for part in whole)
    # At least the last bucket is exposed; the rest takes a share of the device.
    took = communication.state_collective_seconds(at_end, job.cluster, layout, *whole)
    least = max(communication.state_collective_seconds(at_end, job.cluster, layout, *last), took - hidden)
    return least + (took - least) * job.sm_share
