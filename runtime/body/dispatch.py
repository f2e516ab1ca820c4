"""Exchange of tokens between expert-parallel devices, for a mixture of experts that runs by its body.

`dispatch_tokens` runs a Route and `combine_tokens` a Combine where each device of ep holds some of the experts. The
expert capacity is that of the busiest expert of all devices of ep and etp, so that all messages have one size.
"""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all
from torch import Tensor

from megaloom.dsl import Value
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.reference.routing import combine_expert_outputs, expert_capacity, tokens_by_expert


def dispatch_tokens(out: Value, x: Tensor, gate: Tensor, *, groups: ProcessGroups) -> Tensor:
    """Return the tokens of this device's experts: [experts, ep * capacity, embed], ordered by the sending device."""
    sent = tokens_by_expert(out, x, gate, capacity=_common_capacity(out, gate, groups))
    received = all_to_all(groups.collection.ep, sent.contiguous())
    return received.unflatten(0, (groups.layout.ep, -1)).transpose(0, 1).flatten(1, 2)


def combine_tokens(out: Value, y: Tensor, gate: Tensor, *, groups: ProcessGroups) -> Tensor:
    """Return the weighted sum of expert outputs for each of this device's tokens.

    y: the outputs of this device's experts, [experts, ep * capacity, embed].
    """
    sent = y.unflatten(1, (groups.layout.ep, -1)).transpose(0, 1).flatten(0, 1)
    received = all_to_all(groups.collection.ep, sent.contiguous())
    return combine_expert_outputs(out, received, gate, capacity=_common_capacity(out, gate, groups))


def _common_capacity(out: Value, gate: Tensor, groups: ProcessGroups) -> int:
    """Return the largest expert capacity of all devices of ep and etp."""
    capacity = expert_capacity(out, gate)
    dist.all_reduce(capacity, dist.ReduceOp.MAX, group=groups.collection.tp_ep)
    return int(capacity)
