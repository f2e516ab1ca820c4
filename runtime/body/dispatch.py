"""Tokens on their way to experts on other devices and back, for a mixture whose body runs.

Protocol: `there` and `back` are what a Route and a Combine compute where each device of ep holds some of the experts.
All devices of ep and etp make as many slots of each expert as the busiest of them needs: parts are of one size.
"""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all
from torch import Tensor

from megaloom.dsl import Value
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.reference.routing import busiest, combined, routed


def there(out: Value, x: Tensor, gate: Tensor, *, groups: ProcessGroups) -> Tensor:
    """The tokens of this device's experts: [experts slots embed], the slots of one device of ep after another's."""
    sent = routed(out, x, gate, slots=_slots(out, gate, groups))
    got = all_to_all(groups.collection.ep, sent.contiguous())
    return got.unflatten(0, (groups.layout.ep, -1)).transpose(0, 1).flatten(1, 2)


def back(out: Value, y: Tensor, gate: Tensor, *, groups: ProcessGroups) -> Tensor:
    """The results for this device's tokens, from those of its experts."""
    sent = y.unflatten(1, (groups.layout.ep, -1)).transpose(0, 1).flatten(0, 1)
    got = all_to_all(groups.collection.ep, sent.contiguous())
    return combined(out, got, gate, slots=_slots(out, gate, groups))


def _slots(out: Value, gate: Tensor, groups: ProcessGroups) -> int:
    most = busiest(out, gate)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=groups.collection.tp_ep)
    return int(most)
