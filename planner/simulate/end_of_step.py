"""What follows the last micro-batch: gradient reduction, tied weights, the optimizer; and what of it is hidden.

Protocol: `tail` is one pipeline rank's; all its figures are seconds. Not here is the reading of data: a device gets
some 40 bytes of a token over PCIe while it computes, in a step of a million tokens for a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from megaloom.dsl.dims import NBYTES, DType
from megaloom.planner.contract.choices import Overlap
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision
from megaloom.planner.cost import communication, memory
from megaloom.planner.cost.communication import ProcessGroup
from megaloom.planner.cost.profiles.frameworks import OWN
from megaloom.planner.cost.profiles.groups import FrameworkProfile

COPIED = 4 + 2  # bytes moved to make a 16-bit weight of its master
# Gradients are reduced in buckets, each as soon as it is whole, so that the last one is exposed (megatron-core 0.16.1,
# distributed_data_parallel_config.py and distributed_data_parallel.py:115): elements of one, at least and by rank.
BUCKET, BUCKET_BY_RANK = 40_000_000, 1_000_000


@frozen
class EndOfStep:
    """What one rank does after its last micro-batch."""

    reduction: float  # of gradients
    gathering: float  # of the weights that the distributed optimizer's shares have become
    tied: float
    optimizer: float  # with the norm of the gradient, for which all wait

    @property
    def total(self) -> float:
        """All of it."""
        return self.reduction + self.gathering + self.tied + self.optimizer


@frozen
class OverlapWindow:
    """Seconds of computation behind which a rank's exchanges may hide.

    That is its last backward, and its first forward; of interleaved chunks, whose gradients are whole one after the
    other, also those of the micro-batches of the last group that follow (of the first group that come before).
    """

    backward: float = 0.0
    forward: float = 0.0


def end_of_step(
    params: float,
    experts: float,
    tied: float,
    layout: Layout,
    precision: Precision,
    cluster: Cluster,
    profile: FrameworkProfile = OWN,
    cover: OverlapWindow = OverlapWindow(),
) -> EndOfStep:
    """The tail of a rank that holds so many elements of dense and experts' weights; `tied` seconds are its own."""
    sizes = ((params, communication.process_group("dp", layout)), (experts, communication.process_group("edp", layout)))
    parts = [(elements, group) for elements, group in sizes if elements]
    reduced = "reduce_scatter" if layout.distributed_optimizer else "all_reduce"
    reduction = _seen(
        reduced,
        profile.optimizer.gradient_nbytes,
        parts,
        cluster,
        layout.has_overlap(Overlap.GRADIENTS),
        cover.backward,
    )
    gathering = 0.0
    if layout.distributed_optimizer:
        gathering = _seen(
            "all_gather", precision.nbytes, parts, cluster, layout.has_overlap(Overlap.WEIGHTS), cover.forward
        )
    dense, expert = memory.optimizer_shards(layout)
    copied = 0 if precision is Precision.FP32 else COPIED
    moved = (profile.optimizer.step_moved_nbytes + copied) * (params / dense + experts / expert)
    moved += profile.optimizer.gradient_nbytes * (params + experts)  # set to zero
    return EndOfStep(reduction, gathering, tied, moved / cluster.device.moves + gradient_norm_seconds(layout, cluster))


def gradient_norm_seconds(layout: Layout, cluster: Cluster) -> float:
    """Seconds to add up one number over all devices, or over those of a copy of the model if each has all gradients.

    Source: megatron-core 0.16.1, optimizer/clip_grads.py: get_grad_norm_fp32.
    """
    groups = [ProcessGroup(layout.world, 1)]
    if not layout.distributed_optimizer:
        groups = [communication.process_group("pp", layout), communication.process_group("tp", layout)]
    return sum(
        communication.collective_seconds("all_reduce", NBYTES[DType.FLOAT32], group, cluster) for group in groups
    )


def _seen(
    kind: str,
    nbytes: int,
    parts: Sequence[tuple[float, ProcessGroup]],
    cluster: Cluster,
    overlapped: bool,
    cover: float,
) -> float:
    """Seconds for which all wait for a collective of dense and of experts' weights: one after the other.

    Overlapped, both are under way at once, and at least the last bucket is seen; what is hidden takes a share of the
    device meanwhile.
    """
    each = [(nbytes * elements, group) for elements, group in parts]
    if not overlapped:
        return sum(communication.collective_seconds(kind, n, group, cluster) for n, group in each)
    ends = [(nbytes * min(n, max(BUCKET, BUCKET_BY_RANK * group.size)), group) for n, group in parts]
    took = communication.concurrent_seconds(kind, each, cluster)
    seen = max(communication.concurrent_seconds(kind, ends, cluster), took - cover)
    return seen + (took - seen) * communication.sm_share(cluster.device)


def tied_weight_seconds(
    elements: int, ranks: set[int], layout: Layout, cluster: Cluster, profile: FrameworkProfile = OWN
) -> float:
    """Seconds to add up the gradients of a weight that these pipeline ranks share."""
    if len(ranks) == 1:
        return 0.0
    apart = (max(ranks) - min(ranks)) // (len(ranks) - 1) * (layout.world // layout.pp)
    return communication.collective_seconds(
        "all_reduce", profile.optimizer.gradient_nbytes * elements, ProcessGroup(len(ranks), apart), cluster
    )
