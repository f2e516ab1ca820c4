"""A model chunk whose weights are sharded over data-parallel ranks: torch's FSDP with the interface of DDP.

Each unit (see `shard_units`) is gathered before it runs. The fp32 shards are the master weights. megatron-core's
schedules, its optimizer and its reductions over other axes see plain tensors: this rank's rows of each parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megaloom.planner.contract.state_placement import SHARDED
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.megatron.weight_shards import row_shard
from megaloom.runtime.modules.model_chunk import ModelChunk

from .shard_units import ShardedUnits, shard_units
from .unused_weights import check_outputs


class ShardedChunk(_BaseDataParallel):  # type: ignore[misc]
    """A model chunk with sharded weights. Gathered weights are freed when a step or an evaluation ends.

    `parameters` and `named_parameters` are this rank's rows, as plain tensors. After `finish_grad_sync`, these and the
    parameters of the modules have the gradient of the rows as `main_grad`.
    """

    root: ShardedUnits
    use_forward_hook = False  # of megatron-core: modules wait for no gather

    def __init__(self, config: TransformerConfig, module: ModelChunk, groups: ProcessGroups) -> None:
        super().__init__(config=config, module=module)
        self.ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
        # Not registered, so that modules and parameters have one name each, that of the model chunk.
        object.__setattr__(self, "root", shard_units(module, groups, config.params_dtype))
        self.trained = [(p, s) for p in module.parameters() if p.requires_grad and (s := row_shard(p))]

    def forward(self, **inputs: Any) -> Tensor | dict[str, Tensor]:
        """Run the model chunk. Without gradients, nothing stays gathered."""
        if self.module.returns_predictions and self.training:
            check_outputs(self.module)
        out: Tensor | dict[str, Tensor] = self.root(**inputs)
        if not torch.is_grad_enabled():
            self.free_weights()
        return out

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the rows of each parameter that this rank holds, by the name of the parameter."""
        for name, p in super().named_parameters(*args, **options):
            shard = row_shard(p)
            yield name, p if shard is None else shard.values

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes inside the context add up whole gradients of the weights that are reduced once a step."""
        self._set_last(False)
        try:
            yield
        finally:
            self._set_last(True)

    def _set_last(self, last: bool) -> None:
        """Say whether the next backward pass is the last of a step."""
        reduces = False
        for unit, placed in self.root.placed_units():
            every_pass = placed.gradients == SHARDED
            unit.set_requires_gradient_sync(last or every_pass, recurse=False)
            reduces |= every_pass
        self.root.set_is_last_backward(last or reduces)

    def start_param_sync(self, *unused: Any, **options: Any) -> None:
        """Do nothing: the next pass gathers the weights."""

    def finish_grad_sync(self, *unused: Any, **options: Any) -> None:
        """Take over the reduced gradients as `main_grad`, zeros where the loss does not reach, and free the weights."""
        self.free_weights()
        for p, shard in self.trained:
            gradient = p.grad
            values = torch.zeros_like(shard.values) if gradient is None else gradient.to_local()
            p.grad = None
            p.main_grad = shard.values.main_grad = values

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a factor."""
        gradients = [shard.values.main_grad for _, shard in self.trained]
        if gradients:
            torch._foreach_mul_(gradients, float(factor))

    def zero_grad_buffer(self) -> None:
        """Free all gradients."""
        for p, shard in self.trained:
            p.grad = shard.values.grad = p.main_grad = shard.values.main_grad = None

    def free_weights(self) -> None:
        """Free the gathered weights of all units."""
        for unit in self.root.sharded_units():
            unit.reshard()
