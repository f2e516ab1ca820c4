"""Conversion of the weights of a model to the parameters of its modules, and to this rank's shards of them.

In the model, weights have layout-independent names (`attention.3.q`) and full shapes. `parameters` computes from them,
for each class of layer, the full parameters of its megatron-core module. `fill_shards` copies this rank's shard of
each. Initial values come from `initial_weights`, so they do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from math import prod
from typing import Any, TypeVar

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from megaloom.dsl import (
    MLP,
    Attention,
    ClampedGLU,
    Dropout,
    Embed,
    GeGLU,
    LayerNorm,
    MoE,
    Node,
    Op,
    Pointwise,
    Positions,
    RMSNorm,
    Slot,
    SwiGLU,
    Unembed,
    UserError,
)
from megaloom.runtime.body.body_module import Body
from megaloom.runtime.megatron.padded_shards import with_padding
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.weights.views import View, values_of

X = TypeVar("X", Tensor, View)
Draw = Callable[[Slot, int | None], Any]  # returns the full weight of a slot, or one copy of it: a tensor or a View
Parameters = dict[str, Any]  # tensors or views


@frozen
class Weights:
    """The full weights of one node, by their names in the layer."""

    slots: dict[str, Slot]
    draw: Draw
    experts: range  # the experts that this rank holds
    index: int | None = None  # selects one expert

    def __call__(self, name: str) -> Any:
        """Return the full weight of this name, as a tensor or a view."""
        return self.draw(self.slots[name], self.index)

    def nested(self, name: str) -> Weights:
        """Return the weights of a nested layer."""
        prefix = name + "."
        slots = {k.removeprefix(prefix): s for k, s in self.slots.items() if k.startswith(prefix)}
        return evolve(self, slots=slots)


@singledispatch
def parameters(op: Op, w: Weights) -> Parameters:
    """Return the full parameters, by name, of the module that `registry.registered_module` builds for an op.

    They are rearrangements of weights: functions of `w` here only permute, reshape, split and concatenate, so that they
    serve tensors and views. A layer with its own torch module has a method `parameters(self, w)`, which gets tensors
    and may compute anything. Raise UserError if it is missing.
    """
    method = getattr(op, "parameters", None)
    if method is None:
        raise UserError(
            f"{op} has its own torch module, but no method that computes the module's parameters\n"
            "write a method parameters(self, w) that returns them by name, such as {'weight': w('up').T}"
        )
    return dict(method(evolve(w, draw=lambda slot, index: values_of(w.draw(slot, index)))))


@parameters.register(Dropout)
@parameters.register(Pointwise)
def _(op: Op, w: Weights) -> Parameters:
    return {}


@parameters.register(Embed)
@parameters.register(Positions)
@parameters.register(Unembed)
def _(op: Embed | Positions | Unembed, w: Weights) -> Parameters:
    """One row per token or position, whichever dim the table was declared with first; and the bias of logits."""
    name = next(name for name, slot in w.slots.items() if slot.value is op.table)
    out = {"weight": w(name) if w.slots[name].dims[-1].name == "embed" else w(name).T}
    return out | {"bias": w("bias")} if isinstance(op, Unembed) and op.bias else out


@parameters.register
def _(op: RMSNorm, w: Weights) -> Parameters:
    return {"weight": w("scale")}


@parameters.register
def _(op: LayerNorm, w: Weights) -> Parameters:
    return {"weight": w("scale")} | ({"bias": w("shift")} if op.bias else {})


@parameters.register
def _(op: Attention, w: Weights) -> Parameters:
    """linear_qkv's rows are grouped by key/value head: queries, key, value (megatron-core's attention.py)."""
    q, k, v, o = (w(name) for name in "qkvo")
    out = {
        "linear_qkv.weight": _by_group(q.permute(1, 2, 0), k.permute(1, 2, 0), v.permute(1, 2, 0)),
        "linear_proj.weight": o.flatten(0, 1).T,
    }
    if op.bias or op.qkv_bias:
        out["linear_qkv.bias"] = _by_group(*(w(f"{name}_bias") for name in "qkv"))
    if op.qk_norm is not None:
        for name in "qk":
            norm = parameters(op.qk_norm, w.nested(f"{name}_norm"))
            out |= {f"{name}_layernorm.{k}": t for k, t in norm.items()}
    return out | {"linear_proj.bias": w("o_bias")} if op.bias else out


def _by_group(q: Any, k: Any, v: Any) -> Any:
    """Return queries [heads, head_dim, …], keys and values [kv_heads, head_dim, …] as rows, group by group."""
    groups = k.shape[0]
    q = q.unflatten(0, (groups, q.shape[0] // groups))
    return torch.cat([q, k[:, None], v[:, None]], 1).flatten(0, 2)


@parameters.register
def _(op: MLP, w: Weights) -> Parameters:
    return _mlp_parameters(w, "up", bias=op.bias)


@parameters.register
def _(op: SwiGLU, w: Weights) -> Parameters:
    return _mlp_parameters(w, "gate", "up", bias=op.bias)


@parameters.register
def _(op: GeGLU, w: Weights) -> Parameters:
    return _mlp_parameters(w, "gate", "up")


@parameters.register
def _(op: ClampedGLU, w: Weights) -> Parameters:
    return _mlp_parameters(w, "gate", "up", bias=True)


def _mlp_parameters(w: Weights, *first: str, bias: bool = False) -> Parameters:
    """Return the parameters of an MLP whose first matrix has the rows of the weights `first`."""
    out = {"linear_fc1.weight": torch.cat([w(name).T for name in first]), "linear_fc2.weight": w("down").T}
    if bias:
        out["linear_fc1.bias"] = torch.cat([w(f"{name}_bias") for name in first])
        out["linear_fc2.bias"] = w("down_bias")
    return out


@parameters.register
def _(op: MoE, w: Weights) -> Parameters:
    out = {"router.weight": w("router").T}
    out |= {"router.bias": w("router_bias")} if op.bias else {}
    out |= {"router.expert_bias": w("correction")} if op.corrected else {}
    if op.shared is not None:
        out |= {f"shared_experts.{k}": t for k, t in parameters(op.shared, w.nested("shared")).items()}
    expert_weights = w.nested("experts")
    for local, index in enumerate(w.experts):
        one = evolve(expert_weights, index=index)
        out |= {f"experts.local_experts.{local}.{k}": t for k, t in parameters(op.expert, one).items()}
    return out


def is_built_in(op: Op) -> bool:
    """Return whether the parameters of an op's module are given here, not by a method or function of a user's own."""
    own = parameters.dispatch(type(op))
    return own is not parameters.dispatch(object) and own.__module__ == __name__


def node_parameters(node: Node, module: nn.Module, draw: Draw, groups: ProcessGroups) -> Parameters:
    """Return the full parameters of a node's module, with the experts of this rank only. For a body, its weights."""
    slots = {s.name.removeprefix(node.name + "."): s for s in node.weights}
    if isinstance(module, Body):
        full = {n: _body_weight(s, draw, groups, of_experts=n in module.expert_weight_names) for n, s in slots.items()}
        return full | {n: full[n].T for n in (module.names[i] for i in module.transposed_weights)}
    local_experts = range(0)
    if isinstance(node.op, MoE):
        count = node.op.experts // groups.layout.ep
        local_experts = range(groups.ep_rank * count, (groups.ep_rank + 1) * count)
    return parameters(node.op, Weights(slots, draw, local_experts))


def _body_weight(slot: Slot, draw: Draw, groups: ProcessGroups, *, of_experts: bool) -> Any:
    """Return the full weight of a body; of expert weights, the experts of this rank only."""
    if not of_experts or groups.layout.ep == 1:
        return draw(slot, None)
    dims = [d.known for d in slot.outer]
    count, rows = prod(dims) // groups.layout.ep, dims[0] // groups.layout.ep
    first = draw(slot, groups.ep_rank * count)
    if isinstance(first, View):  # nothing is read, so nothing is drawn in vain
        return draw(slot, None).narrow(0, groups.ep_rank * rows, rows)
    others = [draw(slot, i) for i in range(groups.ep_rank * count + 1, (groups.ep_rank + 1) * count)]
    return torch.stack([first, *others]).unflatten(0, (rows, *dims[1:]))


@torch.no_grad()
def fill_shards(module: nn.Module, full: Parameters, groups: ProcessGroups) -> None:
    """Copy this rank's shard of each full parameter into the module, and of each buffer that `full` names.

    Of a view only the shard is read, one parameter after the other.
    """
    targets = dict(module.named_parameters())
    targets |= {name: b for name, b in module.named_buffers() if name in full}
    assert targets.keys() == full.keys(), f"{type(module).__name__} has {targets.keys()}, the layer {full.keys()}"
    for name, p in targets.items():
        p.copy_(values_of(rank_shard(full[name], p, *shard_position(p, groups))))


def shard_position(p: Tensor, groups: ProcessGroups) -> tuple[int, int]:
    """Return this rank's index and the number of ranks that may shard a parameter: over etp for experts, else tp."""
    if getattr(p, "allreduce", True):
        return groups.tp_rank, groups.layout.tp
    return groups.etp_rank, groups.layout.etp


def rank_shard(full: X, p: Tensor, rank: int, size: int) -> X:
    """Return this rank's shard of a full parameter, by the attributes that megatron-core sets on its parameters.

    `partition_dim` is the sharded dimension. A `partition_stride` of 2 means two halves (gate and up), each of them
    sharded. Rows that pad the vocabulary are zero.
    """
    dim, stride = getattr(p, "partition_dim", -1), getattr(p, "partition_stride", 1)
    if dim < 0:  # not sharded, but perhaps padded
        dim, size, rank = getattr(p, "pad_dim", None), 1, 0
    if dim is None:
        return full
    full = with_padding(full, dim, p.shape[dim] * size)
    return torch.cat([part.chunk(size, dim)[rank] for part in full.chunk(stride, dim)], dim) if size > 1 else full
