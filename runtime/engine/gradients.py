"""Gradients of the whole model by the names of its weights, gathered from the shards of all ranks.

They have the names and shapes of `graph(model).weights`, whatever the layout and whichever module runs a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from torch import Tensor

from megaloom.dsl import Node, Slot, UserError
from megaloom.runtime.modules.built_node import BuiltNode
from megaloom.runtime.modules.initial_weights import given_weight
from megaloom.runtime.optimizer.optimizer import TrainedChunk

Part = tuple[np.ndarray, np.ndarray]
"""Indices of elements of the weights of a node, and their gradients in float32, both one-dimensional.

They are arrays of numpy, because pickling a tensor takes ten times as long as pickling an array.
"""

GATHERED_ELEMENTS = 2**24
"""Elements of small weights that are gathered at once."""


@frozen(eq=False)
class WeightGradient:
    """The gradient of one weight of the model."""

    value: Tensor  # float32, of dims `slot.dims`, on CPU; the mean of the least and the largest where ranks differ
    disagreement: float  # largest difference between two ranks that hold one element: 0, but for rounding


@torch.no_grad()
def gather_gradients(chunks: Sequence[TrainedChunk], loss_scale: float = 1.0) -> dict[str, WeightGradient] | None:
    """Return the reduced gradients of all trained weights on rank 0, None on other ranks. Every rank calls it.

    The gradients in the buffers of DDP are complete afterwards, on all ranks. loss_scale: of fp16, divided out.
    """
    for chunk in chunks:
        _gather_buckets(chunk)
    own = {it.node.name: it for chunk in chunks for it in chunk.module.nodes}
    out: dict[str, WeightGradient] = {}
    graph = chunks[0].module.graph
    first = dist.get_rank() == 0
    for nodes in _batches([n for n in graph.nodes if any(s.trained for s in n.weights)]):
        parts = [_parts(own[n.name], loss_scale) if n.name in own else [] for n in nodes]
        gathered: list[list[list[Part]]] = [[] for _ in range(dist.get_world_size())]
        dist.gather_object(parts, gathered if first else None)
        for node, *each in zip(nodes, *gathered, strict=True) if first else ():
            for name, gradient in _assemble(node, [part for of_rank in each for part in of_rank]):
                out[name] = gradient if name not in out else _joined(out[name], gradient)
    return out if dist.get_rank() == 0 else None


def _batches(nodes: list[Node]) -> Iterator[list[Node]]:
    """Yield consecutive nodes whose weights are gathered at once: one, or several with few elements."""
    batch: list[Node] = []
    count = 0
    for node in nodes:
        size = sum(map(_numel, node.weights))
        if batch and count + size > GATHERED_ELEMENTS:
            yield batch
            batch, count = [], 0
        batch, count = [*batch, node], count + size
    if batch:
        yield batch


def _gather_buckets(chunk: TrainedChunk) -> None:
    """Gather the gradients that the distributed optimizer has left on one data-parallel rank each."""
    if not chunk.ddp_config.use_distributed_optimizer:
        return
    for bucket_group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        group = bucket_group.intra_distributed_optimizer_instance_group
        for bucket in bucket_group.buckets:
            own = shard_buffer(bucket.grad_data, group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def _parts(it: BuiltNode, loss_scale: float) -> list[Part]:
    """Return this rank's part of the gradients of a node, on CPU."""
    indices = element_indices(it)
    named = ((name, p) for name, p in it.module.named_parameters() if p.requires_grad)
    return [
        (indices[name].flatten().numpy(), (p.main_grad.float() / loss_scale).flatten().cpu().numpy())  # type: ignore
        for name, p in named
    ]


def element_indices(it: BuiltNode) -> dict[str, Tensor]:
    """Return for each parameter of a module which elements of the node's weights this rank's shard holds.

    Elements are counted over all weights of the node, from 1; 0 is padding. The parameters are computed from tensors of
    these numbers, as their initial values are from the initial weights.
    """
    slots = it.node.weights
    starts = accumulate(map(_numel, slots), initial=1)
    numbers = {
        s.name: torch.arange(start, start + _numel(s)).view([d.known for d in s.dims])
        for s, start in zip(slots, starts, strict=False)
    }

    def draw(slot: Slot, index: int | None) -> Tensor:
        return given_weight(slot, numbers, index)

    full = it.full(draw)
    return {name: it.shard(full[name], p) for name, p in it.module.named_parameters()}


def _numel(slot: Slot) -> int:
    return prod(d.known for d in slot.dims)


def _assemble(node: Node, parts: Iterable[Part]) -> Iterable[tuple[str, WeightGradient]]:
    """Yield the gradient of each trained weight of a node, from the parts of all ranks.

    A weight may have no parts here: it is frozen by a parameter group, or shared and another node has its gradient.
    """
    count = 1 + sum(map(_numel, node.weights))
    low, high = torch.full((count,), torch.inf), torch.full((count,), -torch.inf)
    for indices, gradient in (map(torch.from_numpy, part) for part in parts if part[0].size):
        if int(indices.min()) < 0 or int(indices.max()) >= count:
            raise _no_gradients(node)
        low.scatter_reduce_(0, indices, gradient, "amin")
        high.scatter_reduce_(0, indices, gradient, "amax")
    low, high = low[1:], high[1:]
    sizes = [_numel(s) for s in node.weights]
    for slot, least, most in zip(node.weights, low.split(sizes), high.split(sizes), strict=True):
        if slot.trained and not bool(torch.isinf(least).all()):
            if bool((least > most).any()):
                raise _no_gradients(node)
            value = torch.where(least == most, least, (least + most) / 2)
            yield slot.name, WeightGradient(value.view([d.known for d in slot.dims]), float((most - least).max()))


def _no_gradients(node: Node) -> UserError:
    return UserError(
        f"cannot return the gradients of {node.name} by weight: the parameters of its module are not just the elements "
        "of its weights in another order\n"
        "write a method parameters(self, w) that only permutes, stacks and joins weights"
    )


def _joined(one: WeightGradient, other: WeightGradient) -> WeightGradient:
    """Return the gradient of a weight that two nodes share, which have computed the sum over both."""
    gap = float((one.value - other.value).abs().max())
    return WeightGradient((one.value + other.value) / 2, gap + max(one.disagreement, other.disagreement))
