"""Sends between pipeline stages whose tensors differ in size.

megatron-core's schedules receive tensors of one shape. `StageCommunicator` knows the size of each tensor that a rank
receives, in the order of the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from .process_groups import ProcessGroups


class StageCommunicator(P2PCommunicator):
    """Sends and receives the tensors [elements] of one pass through the pipeline.

    elements: what crosses the boundary before each stage and after the last, in the order of the stages.
    """

    def __init__(
        self, groups: ProcessGroups, config: TransformerConfig, elements: Sequence[int], microbatches: int
    ) -> None:
        super().__init__(groups.collection.pp, config)
        layout, last = groups.layout, len(elements) - 1
        table = get_schedule_table(microbatches, layout.vpp, layout.microbatch_group_size)
        forward = [chunk * layout.pp + groups.pp_rank for _, chunk in table]
        backward = [(layout.vpp - 1 - chunk) * layout.pp + groups.pp_rank + 1 for _, chunk in table]
        self._sent: deque[Tensor] = deque(maxlen=2)  # keeps what may still be sent: the schedules wait one send later
        self._from_previous = iter([elements[stage] for stage in forward if stage > 0])
        self._from_next = iter([elements[stage] for stage in backward if stage < last])

    def _communicate(self, *, recv_prev: bool, recv_next: bool, tensor_shape: Any, **options: Any) -> Any:
        """Send and receive; a tensor that is received has the next size of its direction."""
        assert not (recv_prev and recv_next), "the schedules of our settings receive one tensor at a time"
        if recv_prev or recv_next:
            tensor_shape = (next(self._from_previous if recv_prev else self._from_next),)
        if (output := options.get("tensor_send_next")) is not None:
            self._sent.append(output.detach())
        return super()._communicate(recv_prev=recv_prev, recv_next=recv_next, tensor_shape=tensor_shape, **options)
