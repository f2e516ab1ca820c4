"""The price of one layout: seconds of a step by cause, bytes of each pipeline rank by holder.

`price_layout` is the pipeline: cost table, partition, simulation of one step. It has no caches; a search keeps what its
layouts share in `planner/search/pricing.py`. All times are seconds. The simulation leaves out the reading of data: a
device gets some 40 bytes of a token over PCIe while it computes, in a step of a million tokens for a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from attrs import frozen

from megaloom.dsl.dims import NBYTES, DType
from megaloom.planner.contract.choices import Overlap
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Rows
from megaloom.planner.contract.plans import Prediction, Stage
from megaloom.planner.contract.workload import Precision
from megaloom.planner.cost import communication
from megaloom.planner.cost.columns import (
    STEP_COLUMNS,
    CostColumn,
)
from megaloom.planner.cost.communication import ProcessGroup
from megaloom.planner.cost.cost_table import cost_table
from megaloom.planner.cost.job import Job
from megaloom.planner.model.structure import stages_of
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
    """Seconds of one pipeline rank after its last backward pass."""

    reduction: float  # of gradients
    gathering: float  # of weights, which the distributed optimizer updates in shards
    tied: float  # of gradients of weights that several ranks share
    optimizer: float  # with the gradient norm, for which all ranks wait

    @property
    def total(self) -> float:
        """Return the seconds of all parts."""
        return self.reduction + self.gathering + self.tied + self.optimizer


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
                params=stage.params + stage.expert_params,
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
    ends, blocked = [end_of_rank(placed, rank) for rank in range(x.pp)], placed.blocked_seconds
    computing: Rows = m * placed.stage_sums[:, STEP_COLUMNS].sum(axis=1).reshape(x.vpp, x.pp).sum(axis=0)
    busy = [float(computing[r]) + blocked[r] + ends[r].total for r in range(x.pp)]
    busiest = max(range(x.pp), key=busy.__getitem__)
    columns, end = m * placed.stage_sums[busiest :: x.pp].sum(axis=0), ends[busiest]
    parts = {cause: float(columns[of].sum()) for cause, of in CAUSES.items()} | {
        "pipeline communication": blocked[busiest],
        "pipeline bubble": max(0.0, end_seconds(last_backward, ends) - busy[busiest]) if x.pp > 1 else 0.0,
        "gradient communication": end.reduction + end.gathering,
        "tied-weight communication": end.tied,
        "optimizer": end.optimizer,
    }
    step, (low, high) = sum(parts.values()), job.spread
    flops = job.flops / step / x.world
    prediction = Prediction(
        step_seconds=step,
        interval=(low * step, high * step),
        tokens_per_second_per_device=job.workload.tokens / step / x.world,
        flops_per_second_per_device=flops,
        mfu=flops / job.cluster.device.flops[job.workload.precision],
        bubble=max(0.0, 1 - sum(busy) / (x.pp * step)) if x.pp > 1 else 0.0,
        breakdown={cause: part for cause, part in parts.items() if part},
        nbytes=tuple(peak.held for peak in placed.rank_peaks),
        moments=tuple(peak.moment for peak in placed.rank_peaks),
    )
    return Priced(placed, prediction, tuple(ends))


def end_of_rank(placed: Partition, rank: int) -> EndOfStep:
    """Return the end of step of one pipeline rank."""
    x, problem = placed.layout, placed.problem
    passes = (min(x.microbatch_group_size, problem.microbatches) * (x.vpp - 1) + 1) / x.vpp  # in the overlap window
    forward, backward = (sum(each[rank :: x.pp]) for each in (placed.forward_seconds, placed.backward_seconds))
    window = OverlapWindow(passes * backward, passes * forward)
    tied, shared = 0.0, zip(problem.table.structure.shared_weights, problem.table.shared_elements, strict=True)
    for (_, nodes), elements in shared:
        ranks = {stage % x.pp for stage in stages_of(nodes, placed.bounds)}
        if rank in ranks and len(ranks) > 1:
            stride = (max(ranks) - min(ranks)) // (len(ranks) - 1) * (x.world // x.pp)
            nbytes, group = problem.job.profile.optimizer.gradient_nbytes * elements, ProcessGroup(len(ranks), stride)
            tied += communication.collective_seconds("all_reduce", nbytes, group, problem.job.cluster)
    mine = placed.stages[rank :: x.pp]
    params, experts = sum(s.params for s in mine), sum(s.expert_params for s in mine)
    return end_of_step(params, experts, tied, x, problem.job, window)


def end_of_step(
    params: float, experts: float, tied: float, layout: Layout, job: Job, window: OverlapWindow = OverlapWindow()
) -> EndOfStep:
    """Return the end of step of a rank with these elements of dense and expert weights.

    tied: seconds that reduce its tied weights. The gradient norm adds up one number over all devices, or over those of
    one copy of the model if each has all gradients (megatron-core 0.16.1, optimizer/clip_grads.py:
    get_grad_norm_fp32).
    """
    profile, precision, cluster = job.profile, job.workload.precision, job.cluster
    sizes = ((params, communication.process_group("dp", layout)), (experts, communication.process_group("edp", layout)))
    parts = [(elements, group) for elements, group in sizes if elements]
    kind, norm = "all_reduce", [communication.process_group(axis, layout) for axis in ("pp", "tp")]
    gathering = 0.0
    if layout.distributed_optimizer:
        kind, norm = "reduce_scatter", [ProcessGroup(layout.world, 1)]
        hidden = window.forward if layout.has_overlap(Overlap.WEIGHTS) else None
        gathering = _exposed_seconds("all_gather", precision.nbytes, parts, job, hidden)
    hidden = window.backward if layout.has_overlap(Overlap.GRADIENTS) else None
    reduction = _exposed_seconds(kind, profile.optimizer.gradient_nbytes, parts, job, hidden)
    copied = 0 if precision is Precision.FP32 else COPIED
    shard = params / layout.dense_shards + experts / layout.expert_shards
    moved = (profile.optimizer.step_moved_nbytes + copied) * shard
    moved += profile.optimizer.gradient_nbytes * (params + experts)  # set to zero
    scalar = NBYTES[DType.FLOAT32]
    waits = sum(communication.collective_seconds("all_reduce", scalar, group, cluster) for group in norm)
    return EndOfStep(reduction, gathering, tied, moved / cluster.device.moves + waits)


def _exposed_seconds(
    kind: str, nbytes: int, parts: Sequence[tuple[float, ProcessGroup]], job: Job, window: float | None
) -> float:
    """Return the exposed seconds of a collective over dense and expert weights, of `nbytes` an element.

    window: seconds that can hide it; None without overlap, where the parts run one after the other. With overlap they
    run at the same time, at least the last bucket is exposed, and what is hidden takes a share of the device.
    """
    each = [(nbytes * elements, group) for elements, group in parts]
    if window is None:
        return sum(communication.collective_seconds(kind, n, group, job.cluster) for n, group in each)
    last = [(nbytes * min(n, max(BUCKET, BUCKET_BY_RANK * group.size)), group) for n, group in parts]
    took = communication.concurrent_seconds(kind, each, job.cluster)
    exposed = max(communication.concurrent_seconds(kind, last, job.cluster), took - window)
    return exposed + (took - exposed) * job.sm_share


def end_seconds(last_backward: Sequence[float], ends: Sequence[EndOfStep]) -> float:
    """Return when a step ends. All ranks wait for the last gradient reduction; then the slowest one ends the step."""
    reduced = max(end + after.reduction + after.tied for end, after in zip(last_backward, ends, strict=True))
    return reduced + max(after.optimizer + after.gathering for after in ends)
