"""The moves of `megaloom.dsl.facts.propagation` on tensors: what each device of an axis does for the others.

Under context parallelism the parts of a sequence are those of `kernels.zigzag`; any other dim lies in even parts, one
after the other. Gathers and scatters are megatron-core's.
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

from megaloom.dsl.facts.propagation import Transition, TransitionKind
from megaloom.runtime.megatron.kernels import from_zigzag, zigzag
from megaloom.runtime.megatron.process_groups import ProcessGroups


def perform(move: Transition, x: Tensor, dim: int | None, groups: ProcessGroups) -> Tensor:
    """A tensor after a move; `dim` is the place of what the move is along."""
    group = groups.of_axis(move.axis)
    match move.kind:
        case TransitionKind.REPLICATE_WEIGHT:
            return _shared(x, group.size())
        case TransitionKind.REDUCE_PARTIAL if dim is None:
            return _Sum.apply(x, group)
        case TransitionKind.TO_REPLICATE if dim is None:
            return _Copy.apply(x, group)
    assert dim is not None, f"{move} is along a dim"
    match move.kind:
        case TransitionKind.REDUCE_PARTIAL:
            return _first(partial(reduce_scatter_to_sequence_parallel_region, group=group), x, dim)
        case TransitionKind.TO_REPLICATE | TransitionKind.SHARD_TO_REPLICATE:
            return _first(partial(_gathered, move=move, group=group), x, dim)
        case TransitionKind.REPLICATE_TO_SHARD:
            return x.index_select(dim, _places(x.shape[dim], move.axis, group).to(x.device))
        case TransitionKind.SHARD_TO_ZERO_FILLED:
            whole = x.new_zeros([n * group.size() if i == dim else n for i, n in enumerate(x.shape)])
            return whole.index_copy(dim, _places(whole.shape[dim], move.axis, group).to(x.device), x)
        case TransitionKind.REPLICATE_TO_HEADS:
            start, count = shared_heads(move.heads, x.shape[dim], group.rank(), group.size())
            return x.narrow(dim, start, count)
    raise AssertionError(f"no such move: {move}")


def shared_heads(heads: int, shared: int, rank: int, size: int) -> tuple[int, int]:
    """Which of what `heads` share evenly the heads of one rank read: the first, and how many."""
    mine, each = heads // size, heads // shared
    assert mine % each == 0 or each % mine == 0, f"{mine} heads on each of {size} ranks, {each} of which share one"
    return rank * mine // each, max(1, mine // each)


def _gathered(x: Tensor, move: Transition, group: dist.ProcessGroup) -> Tensor:
    """The parts of all, along the first dim; the gradient is summed over the ranks if their work differs."""
    whole = gather_from_sequence_parallel_region(x, move.kind is TransitionKind.TO_REPLICATE, group)
    return from_zigzag(whole, group.size()) if move.axis == "cp" else whole


def _places(whole: int, axis: str, group: dist.ProcessGroup) -> Tensor:
    """The indices of this rank's part of a dim."""
    if axis == "cp":
        return zigzag(whole, group.size(), group.rank())
    return torch.arange(whole).chunk(group.size())[group.rank()]


def _first(move: Callable[[Tensor], Tensor], x: Tensor, dim: int) -> Tensor:
    """A move along the first dim, along another one."""
    return move(x.movedim(dim, 0)).movedim(0, dim)


def _shared(x: Tensor, ranks: int) -> Tensor:
    if not x.requires_grad:
        return x
    x = x.view_as(x)
    x.register_hook(lambda gradient: gradient / ranks)
    return x


def _added(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # megatron-core's all-reduce is in place, and forgets the sum of a tensor that is not contiguous (mappings.py:24).
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


class _Sum(torch.autograd.Function):
    """Partial sums become whole, on every rank; the gradient is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _added(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Copy(torch.autograd.Function):
    """What all ranks have is read by work that differs between them; their gradients are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _added(gradients[0], ctx.group), None
