"""Transitions between placements, performed on tensors: the collectives of `megaloom.dsl.facts.propagation`.

`perform(transition, x, dim, groups)` returns the tensor in its new placement. Under context parallelism the shards of a
sequence are those of `kernels.zigzag`; any other dim has even, contiguous shards. Gathers and scatters are
megatron-core's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megaloom.dsl.facts.placement import Transition, TransitionKind
from megaloom.runtime.megatron.kernels import from_zigzag, zigzag
from megaloom.runtime.megatron.process_groups import ProcessGroups


def perform(transition: Transition, x: Tensor, dim: int | None, groups: ProcessGroups) -> Tensor:
    """Return a tensor after a transition. dim: the index of the dim that the transition names, if any."""
    group = groups.of_axis(transition.axis)
    match transition.kind:
        case TransitionKind.REPLICATE_WEIGHT:
            return _with_gradient_divided(x, group.size())
        case TransitionKind.REDUCE_PARTIAL if dim is None:
            return _ReducePartial.apply(x, group)
        case TransitionKind.TO_REPLICATE if dim is None:
            return _ReduceGradient.apply(x, group)
    assert dim is not None, f"{transition} needs a dim"
    match transition.kind:
        case TransitionKind.REDUCE_PARTIAL:
            return _with_dim_first(partial(reduce_scatter_to_sequence_parallel_region, group=group), x, dim)
        case TransitionKind.TO_REPLICATE | TransitionKind.SHARD_TO_REPLICATE:
            return _with_dim_first(partial(_all_gather, transition=transition, group=group), x, dim)
        case TransitionKind.REPLICATE_TO_SHARD:
            return x.index_select(dim, _shard_indices(x.shape[dim], transition.axis, group).to(x.device))
        case TransitionKind.SHARD_TO_ZERO_FILLED:
            whole = x.new_zeros([n * group.size() if i == dim else n for i, n in enumerate(x.shape)])
            return whole.index_copy(dim, _shard_indices(whole.shape[dim], transition.axis, group).to(x.device), x)
        case TransitionKind.REPLICATE_TO_HEADS:
            start, count = kv_heads_of_rank(transition.heads, x.shape[dim], group.rank(), group.size())
            return x.narrow(dim, start, count)
    raise AssertionError(f"unknown transition: {transition}")


def kv_heads_of_rank(heads: int, kv_heads: int, rank: int, size: int) -> tuple[int, int]:
    """Return (first, count) of the key/value heads that the query heads of one rank read.

    `heads` query heads lie evenly over `size` ranks, and read `kv_heads` key/value heads in groups of equal size.
    """
    local, group = heads // size, heads // kv_heads
    assert local % group == 0 or group % local == 0, f"{local} query heads on each of {size} ranks, groups of {group}"
    return rank * local // group, max(1, local // group)


def _all_gather(x: Tensor, transition: Transition, group: dist.ProcessGroup) -> Tensor:
    """Return the shards of all ranks, along the first dim. TO_REPLICATE sums the gradients of the ranks."""
    whole = gather_from_sequence_parallel_region(x, transition.kind is TransitionKind.TO_REPLICATE, group)
    return from_zigzag(whole, group.size()) if transition.axis == "cp" else whole


def _shard_indices(whole: int, axis: str, group: dist.ProcessGroup) -> Tensor:
    """Return the indices of this rank's shard of a dim of size `whole`."""
    if axis == "cp":
        return zigzag(whole, group.size(), group.rank())
    return torch.arange(whole).chunk(group.size())[group.rank()]


def _with_dim_first(function: Callable[[Tensor], Tensor], x: Tensor, dim: int) -> Tensor:
    """Apply to dim `dim` a function that works on the first dim."""
    return function(x.movedim(dim, 0)).movedim(0, dim)


def _with_gradient_divided(x: Tensor, ranks: int) -> Tensor:
    """Return x, with its gradient divided by the number of ranks: each of them computes the whole gradient."""
    if not x.requires_grad:
        return x
    x = x.view_as(x)
    x.register_hook(lambda gradient: gradient / ranks)
    return x


def _all_reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of a tensor over the ranks of a group."""
    # megatron-core's all-reduce is in place, and loses the sum of a tensor that is not contiguous (mappings.py:24).
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


class _ReducePartial(torch.autograd.Function):
    """Sum over the ranks in the forward pass; the gradient, equal on all ranks, passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _ReduceGradient(torch.autograd.Function):
    """Pass a replicated value to work that differs between ranks; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(gradients[0], ctx.group), None
