"""A node and its module: initial values, and checkpoint shards by the names and dims of weights in the declaration.

Which module runs a layer, and which weights it fuses into one parameter, depends on the layout. A checkpoint does not:
`parameters` says how a parameter is made of weights, and `stored_boxes` inverts that for the shard of a rank. Each box
of a weight is one shard of the checkpoint. Loading makes the parameter of the boxes again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import cached_property
from math import prod
from typing import Any

import torch
from attrs import frozen
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensorFactory
from torch import Tensor, nn

from megaloom.dsl import MoE, Node, Slot
from megaloom.dsl.sharding_table import WHOLE
from megaloom.planner.contract.module_kinds import module_parameters, runs_as_module
from megaloom.runtime.body.body_module import Body
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.megatron.weight_shards import gathered_dtype, own_rows, own_values, row_shard
from megaloom.runtime.weights.views import Box, View, boxes_reader, stored_boxes, symbol, values_of, with_readers

from .experts import StackedExperts
from .initial_weights import given_weight
from .moe import Mixture
from .parameters import Draw, Parameters, Weights, X, is_built_in, local_slots, parameters, rank_shard, shard_position


@frozen(eq=False, slots=False)
class BuiltNode:
    """A graph node, the module that runs it on this rank, and what the module's parameters are made of."""

    node: Node
    module: nn.Module
    groups: ProcessGroups

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers of the module by name."""
        return dict(self.module.named_parameters()) | dict(self.module.named_buffers())

    def full(self, draw: Draw) -> Parameters:
        """Return the full parameters, with the experts of this rank only. For a body, its weights."""
        module, layout = self.module, self.groups.layout
        if isinstance(module, Body):
            slots, names = local_slots(self.node), module.expert_weight_names
            full = {n: _body_weight(s, draw, self.groups, of_experts=n in names) for n, s in slots.items()}
            return full | {n: full[n].T for n in (module.names[i] for i in module.transposed_weights)}
        count = self.node.op.experts // layout.ep if isinstance(self.node.op, MoE) else 0
        local_experts = range(self.groups.ep_rank * count, (self.groups.ep_rank + 1) * count)
        stacked = isinstance(module, Mixture) and isinstance(module.experts, StackedExperts)
        return parameters(self.node.op, Weights.of(self.node, draw, local_experts), stacked_experts=stacked)

    @torch.no_grad()
    def fill(self, draw: Draw) -> None:
        """Copy this rank's shard of each full parameter into the module, and of each buffer that is a weight.

        Of a view only the shard is read, one parameter after the other. Parameters on the meta device are left out.
        """
        full, targets = self.full(draw), dict(self.module.named_parameters())
        targets |= {name: b for name, b in self.module.named_buffers() if name in full}
        kind = type(self.module).__name__
        assert targets.keys() == full.keys(), f"{kind} has {targets.keys()}, the layer {full.keys()}"
        for name, p in targets.items():
            if not p.is_meta:
                p.copy_(values_of(self.shard(full[name], p)))

    @torch.no_grad()
    def fill_rows(self, draw: Draw) -> None:
        """Copy the rows of each full parameter that this rank holds into them. Of a view only the rows are read.

        Values are rounded to the type in which the model computes, as they are where no weights are sharded.
        """
        full = self.full(draw)
        for name, p in self.module.named_parameters():
            own_values(p).copy_(values_of(self.shard(full[name], p)).to(gathered_dtype(p)))

    def shard(self, full: X, p: Tensor) -> X:
        """Return this rank's shard of a full parameter, of which it may hold some of the rows."""
        return own_rows(rank_shard(full, p, *shard_position(p, self.groups)), p)

    @cached_property
    def views(self) -> dict[str, View] | None:
        """The full parameters as rearrangements of weights; None if a method of a user's own computes others."""
        if isinstance(self.module, Body) or is_built_in(self.node.op):
            return self.full(_symbol)
        try:
            full = self.full(_symbol)
            parts = [values.numel() for x in full.values() for *_, values in stored_boxes(x, _sized(x))]
        except Exception:  # such a method may compute anything
            return None
        return full if sum(parts) == sum(prod(d.known for d in s.dims) for s in self.node.weights) else None

    @property
    def parameter_weights(self) -> dict[str, tuple[str, ...]]:
        """The names of the weights that each parameter is made of; its own name, NODE.PARAMETER, if it has no view."""
        if self.views is None:
            return {name: (f"{self.node.name}.{name}",) for name, _ in self.module.named_parameters()}
        return {name: weights_in(self.views[name]) for name, _ in self.module.named_parameters()}

    def shards(self) -> dict[str, ShardedTensorFactory] | None:
        """Return this rank's shards of weights, by the parameters and buffers that hold them; None without `views`."""
        if self.views is None:
            return None
        sizes = {s.name: tuple(d.known for d in s.dims) for s in self.node.weights}
        targets = self.tensors
        return {
            name: _factory(self.shard(view, targets[name]), targets[name], sizes, self.groups)
            for name, view in self.views.items()
            if name in targets
        }


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


def _body_weight(slot: Slot, draw: Draw, groups: ProcessGroups, *, of_experts: bool) -> Any:
    """Return the full weight of a body; of expert weights, the experts of this rank only."""
    full = draw(slot, None)
    if not of_experts or groups.layout.ep == 1:
        return full
    rows = slot.outer[0].known // groups.layout.ep
    return full.narrow(0, groups.ep_rank * rows, rows)


def _symbol(slot: Slot, index: int | None) -> Any:
    """Return a view that stands for a weight, or for one copy of it."""
    return given_weight(slot, {slot.name: symbol([d.known for d in slot.dims], slot.name)}, index)


def _sized(x: View) -> Tensor:
    return torch.empty(x.shape, device="meta")


def _factory(
    shard: View, p: Tensor, sizes: Mapping[str, tuple[int, ...]], groups: ProcessGroups
) -> ShardedTensorFactory:
    """Return this rank's shards of the weights that a parameter is made of. The key is a prefix of their names."""

    def build(key: str, data: Tensor, replica_id: Any, flattened_range: object) -> dict[str, Any]:
        boxes = enumerate(stored_boxes(shard, data))
        shards = {str(i): _shard(key, str(name), box, x, sizes, replica_id) for i, (name, box, x) in boxes}
        return shards or {"padding": LocalNonpersistentObject(None)}

    def merge(loaded: Mapping[str, Tensor]) -> Tensor:
        boxes: dict[Hashable, list[tuple[Box, Callable[[], Tensor]]]] = {}
        for i, (name, box, _) in enumerate(stored_boxes(shard, _sized(shard))):
            boxes.setdefault(name, []).append((box, loaded[str(i)].detach))
        return with_readers(shard, lambda name: boxes_reader(boxes.get(name, ()), torch.float32)).read()

    return ShardedTensorFactory("", own_values(p), build, merge, _replica(p, groups))


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
    if row_shard(p):
        return 0, 0 if getattr(p, "partition_dim", -1) >= 0 else rank, 0
    replicas = groups.collection.dp_cp if getattr(p, "allreduce", True) else groups.collection.expt_dp
    return 0, 0 if getattr(p, "partition_dim", -1) >= 0 else rank, replicas.rank()
