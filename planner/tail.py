"""What follows the last micro-batch: gradient reduction, tied weights, the optimizer. The runtime overlaps none of it.

Protocol: `tail` is one pipeline rank's; all its figures are seconds.
"""

from __future__ import annotations

from attrs import frozen

from . import memory, traffic
from .cluster import Cluster
from .layout import Layout, Precision
from .traffic import Group

# Bytes that a step moves for each element of the optimizer's share: 4 for the gradient's norm and 8 for its scaling;
# AdamW as torch's foreach kernels do it, a pass for each operation (decay 8, first moment 12, second moment 8 + 12,
# root 8, division 8, epsilon 8, update 16); and for bf16 the copy of the master weight.
MOVED = {Precision.FP32: 4 + 8 + 80, Precision.BF16: 4 + 8 + 80 + 4 + 2}
ZEROED = 4  # the whole gradient buffer is


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


def tail(params: float, experts: float, tied: float, layout: Layout, precision: Precision, cluster: Cluster) -> Tail:
    """The tail of a rank that holds so many elements of dense and experts' weights; `tied` seconds are its own."""
    reduction = gathering = 0.0
    for elements, axis in ((params, "dp"), (experts, "edp")):
        group = traffic.group(axis, layout)
        kind = "reduce_scatter" if layout.distributed_optimizer else "all_reduce"
        reduction += traffic.seconds(kind, memory.GRADIENT * elements, group, cluster)
        if layout.distributed_optimizer:
            gathering += traffic.seconds("all_gather", memory.WEIGHT[precision] * elements, group, cluster)
    dense, expert = memory.copies(layout)
    moved = MOVED[precision] * (params / dense + experts / expert) + ZEROED * (params + experts)
    speed = cluster.device.bandwidth * cluster.device.bandwidth_efficiency
    return Tail(reduction, gathering, tied, moved / speed)


def tied(elements: int, ranks: set[int], layout: Layout, cluster: Cluster) -> float:
    """Seconds to add up the gradients of a weight that these pipeline ranks share."""
    if len(ranks) == 1:
        return 0.0
    apart = (max(ranks) - min(ranks)) // (len(ranks) - 1) * (layout.world // layout.pp)
    return traffic.seconds("all_reduce", memory.GRADIENT * elements, Group(len(ranks), apart), cluster)
