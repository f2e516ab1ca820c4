"""Checkpoint shards of a module's parameters, by the names and dims that the model's weights have in the declaration.

Which module runs a layer, and which weights it fuses into one parameter, depends on the layout. A checkpoint does not:
`parameters` says how a parameter is made of weights, and `stored_boxes` inverts that for the shard of a rank. Each box
of a weight is one shard of the checkpoint. Loading makes the parameter of the boxes again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensorFactory
from torch import Tensor, nn

from megaloom.dsl import Node, Slot
from megaloom.dsl.sharding_table import WHOLE
from megaloom.planner.contract.module_kinds import module_parameters, runs_as_module
from megaloom.runtime.body.body_module import Body
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.weights.views import Box, View, boxes_reader, source, stored_boxes, with_readers

from .initial_weights import given_weight
from .parameters import Weights, is_built_in, local_slots, node_parameters, parameters, rank_shard, shard_position


def weight_shards(node: Node, module: nn.Module, groups: ProcessGroups) -> dict[str, ShardedTensorFactory] | None:
    """Return this rank's shards of the weights of a node, by the module's parameters and buffers that hold them.

    Return None for a module of a user's own whose parameters are computed from weights, not rearranged.
    """
    full = _rearrangements(node, module, groups)
    if full is None:
        return None
    sizes = {s.name: tuple(d.known for d in s.dims) for s in node.weights}
    targets = tensors_of(module)
    return {name: _factory(view, targets[name], sizes, groups) for name, view in full.items() if name in targets}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by name."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def parameter_weights(node: Node, module: nn.Module, groups: ProcessGroups) -> dict[str, tuple[str, ...]]:
    """Return the names of the weights that each parameter of a module is made of.

    A parameter of a module of a user's own that is computed from weights has its own name, NODE.PARAMETER.
    """
    full = _rearrangements(node, module, groups)
    if full is None:
        return {name: (f"{node.name}.{name}",) for name, _ in module.named_parameters()}
    return {name: weights_in(full[name]) for name, _ in module.named_parameters()}


def fused_weights(node: Node) -> list[tuple[str, ...]]:
    """Return the weights of a node that its module holds in one parameter, under the layouts where a module runs it."""
    if is_built_in(node.op):
        slots, rows = local_slots(node), module_parameters(node.op) if runs_as_module(node, WHOLE) else ()
        fused = [tuple(slots[w].name for w in p.weights if isinstance(w, str)) for p in rows]
    else:
        try:
            fused = [weights_in(view) for view in parameters(node.op, Weights.of(node, _symbol)).values()]
        except Exception:  # no module, or a method of a user's own that computes anything
            return []
    return [names for names in fused if len(names) > 1]


def weights_in(view: View) -> tuple[str, ...]:
    """Return the names of the weights that a rearrangement of weights consists of."""
    return tuple(dict.fromkeys(str(name) for name, *_ in stored_boxes(view, _sized(view))))


def _rearrangements(node: Node, module: nn.Module, groups: ProcessGroups) -> dict[str, View] | None:
    """Return the whole parameters of a module as rearrangements of weights; None if they are something else."""
    if isinstance(module, Body) or is_built_in(node.op):
        return node_parameters(node, module, _symbol, groups)
    try:
        full = node_parameters(node, module, _symbol, groups)
        parts = [values.numel() for x in full.values() for *_, values in stored_boxes(x, _sized(x))]
    except Exception:  # a method of a user's own, which may compute anything
        return None
    return full if sum(parts) == sum(prod(d.known for d in s.dims) for s in node.weights) else None


def _symbol(slot: Slot, index: int | None) -> View:
    """Return a view that stands for a weight, or for one copy of it."""
    whole = source([d.known for d in slot.dims], torch.float32, _unread, slot.name)
    found = given_weight(slot, {slot.name: whole}, index)
    assert isinstance(found, View)
    return found


def _unread(box: Box) -> Tensor:
    raise AssertionError("a weight that stands for itself has no values")


def _sized(x: View) -> Tensor:
    return torch.empty(x.shape, device="meta")


def _factory(
    view: View, p: Tensor, sizes: Mapping[str, tuple[int, ...]], groups: ProcessGroups
) -> ShardedTensorFactory:
    """Return this rank's shards of the weights that a parameter is made of. The key is a prefix of their names."""
    shard = rank_shard(view, p, *shard_position(p, groups))

    def build(key: str, data: Tensor, replica_id: Any, flattened_range: object) -> dict[str, Any]:
        boxes = enumerate(stored_boxes(shard, data))
        shards = {str(i): _shard(key, str(name), box, x, sizes, replica_id) for i, (name, box, x) in boxes}
        return shards or {"padding": LocalNonpersistentObject(None)}

    def merge(loaded: Mapping[str, Tensor]) -> Tensor:
        boxes: dict[Hashable, list[tuple[Box, Callable[[], Tensor]]]] = {}
        for i, (name, box, _) in enumerate(stored_boxes(shard, _sized(shard))):
            boxes.setdefault(name, []).append((box, loaded[str(i)].detach))
        return with_readers(shard, lambda name: boxes_reader(boxes.get(name, ()), torch.float32)).read()

    return ShardedTensorFactory("", p, build, merge, _replica(p, groups))


def _shard(
    prefix: str, name: str, box: Box, values: Tensor, sizes: Mapping[str, tuple[int, ...]], replica_id: Any
) -> ShardedTensor:
    start = tuple(r.start for r in box)
    return ShardedTensor(
        prefix + name, values, values.dtype, tuple(values.shape), sizes[name], start, None, replica_id=replica_id
    )


def _replica(p: Tensor, groups: ProcessGroups) -> tuple[int, int, int]:
    """Return which replica of its shard this rank has; zeros for the one that is saved."""
    rank, _ = shard_position(p, groups)
    replicas = groups.collection.dp_cp if getattr(p, "allreduce", True) else groups.collection.expt_dp
    return 0, 0 if getattr(p, "partition_dim", -1) >= 0 else rank, replicas.rank()
