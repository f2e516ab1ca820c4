"""The reduce-scatter of gradients of sharded weights, with shards in memory that activations have left.

torch allocates the reduced shards on a stream of their own, so they cannot take memory that the backward pass has
freed: the allocator holds both. Allocated on the stream that computes, they can.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megaloom.runtime.megatron import device


def use_freed_memory(unit: FSDPModule) -> None:
    """Let the reduced gradients of a unit take memory that activations have left. Without streams, nothing changes."""
    if device.gpu_count():
        unit.set_custom_reduce_scatter(ReduceScatterIntoFreedMemory(torch.cuda.current_stream()))


class ReduceScatterIntoFreedMemory:
    """A reduce-scatter as `FSDPModule.set_custom_reduce_scatter` takes it; `compute` is the stream of the model.

    torch lets the stream of the reduction wait for `compute` before it allocates the shard there, so what had the
    memory before is done. `record_stream` keeps the memory until the reduction is done, if the shard is freed earlier.
    """

    def __init__(self, compute: torch.cuda.Stream) -> None:
        self.compute = compute

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the gradients of a unit, or for this rank's shard of their sum."""
        reduces = torch.cuda.current_stream()
        with torch.cuda.stream(self.compute):
            out = torch.empty(*size, dtype=dtype, device=device)
        if reduces != self.compute:
            out.record_stream(reduces)
        return out

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce and scatter."""
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
