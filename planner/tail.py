"""What follows the last micro-batch: gradient reduction, tied weights, the optimizer; and what of it is hidden.

Protocol: `tail` is one pipeline rank's; all its figures are seconds.
"""

from __future__ import annotations

from attrs import frozen

from . import memory, traffic
from .cluster import Cluster
from .layout import Layout, Precision
from .practice import OWN, Practice
from .traffic import Group

COPIED = 4 + 2  # bytes moved to make a 16-bit weight of its master
# Gradients are reduced in buckets, each as soon as it is whole, so that the last one is exposed (megatron-core 0.16.1,
# distributed_data_parallel_config.py and distributed_data_parallel.py:115): elements of one, at least and by rank.
BUCKET, BUCKET_BY_RANK = 40_000_000, 1_000_000
# Multiprocessors that NCCL keeps busy while it moves data between nodes, one a channel (its log of such a communicator,
# as users post it: "16 coll channels").
CHANNELS = 16


@frozen
class Tail:
    """What one rank does after its last micro-batch."""

    reduction: float  # of gradients
    gathering: float  # of the weights that the distributed optimizer's shares have become
    tied: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.reduction + self.gathering + self.tied + self.optimizer


@frozen
class Cover:
    """Seconds of computation behind which a rank's exchanges may hide.

    That is its last backward, and its first forward; of interleaved chunks, whose gradients are whole one after the
    other, also those of the micro-batches of the last group that follow (of the first group that come before).
    """

    backward: float = 0.0
    forward: float = 0.0


def tail(
    params: float,
    experts: float,
    tied: float,
    layout: Layout,
    precision: Precision,
    cluster: Cluster,
    practice: Practice = OWN,
    cover: Cover = Cover(),
) -> Tail:
    """The tail of a rank that holds so many elements of dense and experts' weights; `tied` seconds are its own."""
    reduction = gathering = last = first = 0.0
    for elements, axis in ((params, "dp"), (experts, "edp")):
        group = traffic.group(axis, layout)
        bucket = min(1.0, max(BUCKET, BUCKET_BY_RANK * group.size) / elements) if elements else 0.0
        kind = "reduce_scatter" if layout.distributed_optimizer else "all_reduce"
        took = traffic.seconds(kind, practice.gradient_nbytes * elements, group, cluster)
        reduction, last = reduction + took, last + took * bucket
        if layout.distributed_optimizer:
            took = traffic.seconds("all_gather", precision.nbytes * elements, group, cluster)
            gathering, first = gathering + took, first + took * bucket
    taken = CHANNELS / cluster.device.units if cluster.device.units > CHANNELS else 0.0
    if practice.overlap_gradients:
        reduction = _exposed(reduction, last, cover.backward, taken)
    if practice.overlap_weights:
        gathering = _exposed(gathering, first, cover.forward, taken)
    dense, expert = memory.copies(layout)
    copied = 0 if precision is Precision.FP32 else COPIED
    moved = (practice.adam_nbytes + copied) * (params / dense + experts / expert)
    moved += practice.gradient_nbytes * (params + experts)  # set to zero
    return Tail(reduction, gathering, tied, moved / cluster.device.moves)


def _exposed(took: float, least: float, cover: float, taken: float) -> float:
    """What is left to see of an exchange, at least `least`; what is hidden takes a share of the device meanwhile."""
    seen = max(least, took - cover)
    return seen + taken * (took - seen)


def tied(elements: int, ranks: set[int], layout: Layout, cluster: Cluster, practice: Practice = OWN) -> float:
    """Seconds to add up the gradients of a weight that these pipeline ranks share."""
    if len(ranks) == 1:
        return 0.0
    apart = (max(ranks) - min(ranks)) // (len(ranks) - 1) * (layout.world // layout.pp)
    return traffic.seconds("all_reduce", practice.gradient_nbytes * elements, Group(len(ranks), apart), cluster)
