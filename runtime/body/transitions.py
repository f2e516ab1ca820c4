"""Transitions between placements, performed on tensors: the operations of `megaloom.dsl.facts.placement`.

`perform(transition, x, dim, groups)` returns a tensor in its new placement. In the backward pass it performs the
gradient of the transition.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from megaloom.dsl.facts.placement import Shard, Transition
from megaloom.planner.contract.attention_blocks import local_ranges
from megaloom.runtime.megatron.kernels import from_zigzag
from megaloom.runtime.megatron.process_groups import ProcessGroups


def perform(transition: Transition, x: Tensor, dim: int | None, groups: ProcessGroups) -> Tensor:
    """Return a tensor after a transition. dim: the index of the dim that it shards or gathers, if any."""
    group, whole = groups.of_axis(transition.axis), 0
    if dim is not None:
        whole = x.shape[dim] * (group.size() if isinstance(transition.source, Shard) else 1)
    out: Tensor = _Performed.apply(x, transition, _Ranks(group, dim, whole))
    return out


@frozen
class _Ranks:
    """The ranks of an axis, and the dim of a tensor that they share: its index and its whole size."""

    group: dist.ProcessGroup
    dim: int | None
    whole: int

    def operate(self, transition: Transition, x: Tensor) -> Tensor:
        """Return a tensor after the operation of a transition."""
        match transition.operation:
            case "none":
                return x.view_as(x)
            case "divide":
                return x / self.group.size()
            case "all_reduce":
                x = x.clone(memory_format=torch.contiguous_format)
                dist.all_reduce(x, group=self.group)
                return x
        shard, dim = transition.shard, self.dim
        assert shard is not None and dim is not None, f"{transition} needs a dim"
        match transition.operation:
            case "all_gather":
                return self.gather(shard, x.movedim(dim, 0)).movedim(0, dim)
            case "reduce_scatter":
                return self.scatter(shard, x.movedim(dim, 0)).movedim(0, dim)
            case "slice":
                return self.part(shard, x, self.group.rank(), dim)
            case "zero_fill":
                out = x.new_zeros([self.whole if i == dim else n for i, n in enumerate(x.shape)])
                at = self.ranges(shard, self.group.rank())
                for r, values in zip(at, x.split([len(r) for r in at], dim), strict=True):
                    out.narrow(dim, r.start, len(r)).copy_(values)
                return out

    def gather(self, shard: Shard, x: Tensor) -> Tensor:
        """Return the shards of all ranks along the first dim, in the order of the whole dim."""
        out = x.new_empty([len(x) * self.group.size(), *x.shape[1:]])
        dist.all_gather_into_tensor(out, x.contiguous(), group=self.group)
        return from_zigzag(out, self.group.size()) if shard.zigzag else out

    def scatter(self, shard: Shard, x: Tensor) -> Tensor:
        """Return this rank's shard of the sum of all ranks' tensors along the first dim."""
        ranks = range(self.group.size())
        x = torch.cat([self.part(shard, x, rank) for rank in ranks]) if shard.zigzag else x.contiguous()
        out = x.new_empty([len(x) // len(ranks), *x.shape[1:]])
        dist.reduce_scatter_tensor(out, x, group=self.group)
        return out

    def part(self, shard: Shard, x: Tensor, rank: int, dim: int = 0) -> Tensor:
        """Return a rank's shard of a tensor that is whole along a dim: a copy, but of heads a view."""
        if shard.heads:  # with one rank these are all heads: a copy would be saved beside what recompute frees
            (heads,) = self.ranges(shard, rank)
            return x.narrow(dim, heads.start, len(heads))
        return torch.cat([x.narrow(dim, r.start, len(r)) for r in self.ranges(shard, rank)], dim)

    def ranges(self, shard: Shard, rank: int) -> tuple[range, ...]:
        """Return the indices of a rank's shard in the whole dim."""
        size = self.group.size()
        if shard.heads:
            return (heads_of_rank(shard.heads, self.whole, rank, size),)
        count = self.whole // size
        return local_ranges(count, size, rank) if shard.zigzag else (range(rank * count, (rank + 1) * count),)


class _Performed(torch.autograd.Function):
    """A transition in the forward pass, its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transition: Transition, ranks: _Ranks) -> Tensor:
        ctx.transition, ctx.ranks = transition, ranks
        return ranks.operate(transition, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.operate(ctx.transition.gradient, gradients[0]), None, None


def heads_of_rank(heads: int, count: int, rank: int, size: int) -> range:
    """Return those of `count` key/value heads, or other groups of heads, that the query heads of one rank read.

    `heads` query heads lie evenly over `size` ranks, and read the `count` heads in groups of equal size.
    """
    local, group = heads // size, heads // count
    assert local % group == 0 or group % local == 0, f"{local} query heads on each of {size} ranks, groups of {group}"
    start = rank * local // group
    return range(start, start + max(1, local // group))
