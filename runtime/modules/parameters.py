"""From a model's own weights to the parameters of its modules, and to this rank's share of them.

Weights have layout-independent names (`attention.3.q`) and full shapes in the model; `parameters` says, for each
kind of layer, how they make up the parameters that megatron-core keeps (full, in its order of rows); `fill` takes
this rank's share of each. Initial values come from `initial`, so that they are the same on every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from math import prod

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
from megaloom.runtime.megatron.process_groups import ProcessGroups

Draw = Callable[[Slot, int | None], Tensor]  # the full weight of a slot, or of one copy of it
Parameters = dict[str, Tensor]


@frozen
class Weights:
    """The full weights of one node, by the names they have in its layer."""

    slots: dict[str, Slot]
    draw: Draw
    experts: range  # those that this rank holds
    index: int | None = None  # the expert whose weights these are

    def __call__(self, name: str) -> Tensor:
        """The full weight of this name."""
        return self.draw(self.slots[name], self.index)

    def inside(self, name: str) -> Weights:
        """The weights of a layer within this one."""
        prefix = name + "."
        slots = {k.removeprefix(prefix): s for k, s in self.slots.items() if k.startswith(prefix)}
        return evolve(self, slots=slots)


@singledispatch
def parameters(op: Op, w: Weights) -> Parameters:
    """The full parameters of the module that `build.registered` makes of an op, by their names in it.

    A layer with a module of its own says them in a method, `parameters(self, w)`. Raises UserError if it does not.
    """
    own = getattr(op, "parameters", None)
    if own is None:
        raise UserError(
            f"{op} has a torch module of its own, but does not say what its parameters are made of\n"
            "write a method parameters(self, w) that gives them by name, such as {'weight': w('up').T}"
        )
    return dict(own(w))


@parameters.register(Dropout)
@parameters.register(Pointwise)
def _(op: Op, w: Weights) -> Parameters:
    return {}


@parameters.register(Embed)
@parameters.register(Positions)
@parameters.register(Unembed)
def _(op: Embed | Positions | Unembed, w: Weights) -> Parameters:
    """A row for each token or position, whichever dim the table was declared with first; the bias of logits."""
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
    """linear_qkv's rows go by key/value head: its queries, its key, its value (megatron-core's attention.py)."""
    q, k, v, o = (w(name) for name in "qkvo")
    out = {
        "linear_qkv.weight": _by_group(q.permute(1, 2, 0), k.permute(1, 2, 0), v.permute(1, 2, 0)),
        "linear_proj.weight": o.flatten(0, 1).T,
    }
    if op.bias or op.qkv_bias:
        out["linear_qkv.bias"] = _by_group(*(w(f"{name}_bias") for name in "qkv"))
    if op.qk_norm is not None:
        for name in "qk":
            own = parameters(op.qk_norm, w.inside(f"{name}_norm"))
            out |= {f"{name}_layernorm.{k}": t for k, t in own.items()}
    return out | {"linear_proj.bias": w("o_bias")} if op.bias else out


def _by_group(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[heads, head_dim, …], [kv_heads, head_dim, …] twice → rows of each group together."""
    groups = k.shape[0]
    q = q.unflatten(0, (groups, q.shape[0] // groups))
    return torch.cat([q, k[:, None], v[:, None]], 1).flatten(0, 2)


@parameters.register
def _(op: MLP, w: Weights) -> Parameters:
    out = {"linear_fc1.weight": w("up").T, "linear_fc2.weight": w("down").T}
    return out | {"linear_fc1.bias": w("up_bias"), "linear_fc2.bias": w("down_bias")} if op.bias else out


@parameters.register(SwiGLU)
@parameters.register(GeGLU)
def _(op: SwiGLU | GeGLU, w: Weights) -> Parameters:
    return {"linear_fc1.weight": torch.cat([w("gate").T, w("up").T]), "linear_fc2.weight": w("down").T}


@parameters.register
def _(op: ClampedGLU, w: Weights) -> Parameters:
    return {
        "linear_fc1.weight": torch.cat([w("gate").T, w("up").T]),
        "linear_fc1.bias": torch.cat([w("gate_bias"), w("up_bias")]),
        "linear_fc2.weight": w("down").T,
        "linear_fc2.bias": w("down_bias"),
    }


@parameters.register
def _(op: MoE, w: Weights) -> Parameters:
    out = {"router.weight": w("router").T}
    out |= {"router.bias": w("router_bias")} if op.bias else {}
    out |= {"router.expert_bias": w("correction")} if op.corrected else {}
    if op.shared is not None:
        out |= {f"shared_experts.{k}": t for k, t in parameters(op.shared, w.inside("shared")).items()}
    inside = w.inside("experts")
    for local, index in enumerate(w.experts):
        one = evolve(inside, index=index)
        out |= {f"experts.local_experts.{local}.{k}": t for k, t in parameters(op.expert, one).items()}
    return out


def node_parameters(node: Node, module: nn.Module, draw: Draw, groups: ProcessGroups) -> Parameters:
    """The full parameters of a node's module, its experts those that this rank holds; a body's are the weights."""
    slots = {s.name.removeprefix(node.name + "."): s for s in node.weights}
    if isinstance(module, Body):
        return {name: _held(s, draw, groups, apart=name in module.of_experts) for name, s in slots.items()}
    held = range(0)
    if isinstance(node.op, MoE):
        each = node.op.experts // groups.layout.ep
        held = range(groups.ep_rank * each, (groups.ep_rank + 1) * each)
    return parameters(node.op, Weights(slots, draw, held))


def _held(slot: Slot, draw: Draw, groups: ProcessGroups, *, apart: bool) -> Tensor:
    """The full weight of a body; of experts, those that this rank holds."""
    if not apart or groups.layout.ep == 1:
        return draw(slot, None)
    dims = [d.known for d in slot.outer]
    count = prod(dims) // groups.layout.ep
    held = [draw(slot, i) for i in range(groups.ep_rank * count, (groups.ep_rank + 1) * count)]
    return torch.stack(held).unflatten(0, (dims[0] // groups.layout.ep, *dims[1:]))


@torch.no_grad()
def fill_shards(module: nn.Module, full: Parameters, groups: ProcessGroups) -> None:
    """Give each of a module's parameters this rank's share of its full value; also those buffers that have one."""
    own = dict(module.named_parameters())
    own |= {name: b for name, b in module.named_buffers() if name in full}
    assert own.keys() == full.keys(), f"{type(module).__name__} has {own.keys()}, the layer {full.keys()}"
    for name, p in own.items():
        rank, size = (
            (groups.tp_rank, groups.layout.tp)
            if getattr(p, "allreduce", True)
            else (groups.etp_rank, groups.layout.etp)
        )
        p.copy_(rank_shard(full[name], p, rank, size))


def rank_shard(full: Tensor, p: Tensor, rank: int, size: int) -> Tensor:
    """This rank's share of a full parameter, by the marks that megatron-core's layers leave on theirs.

    `partition_dim` is the dimension that is split; a `partition_stride` of 2 means two parts (gate and up), each
    of them split. Rows that only pad the vocabulary are zero.
    """
    dim = getattr(p, "partition_dim", -1)
    if dim < 0 or size == 1:
        return full
    stride = p.partition_stride  # type: ignore[attr-defined]
    missing = p.shape[dim] * size - full.shape[dim]
    if missing:
        padding = [missing if i == dim else n for i, n in enumerate(full.shape)]
        full = torch.cat([full, full.new_zeros(padding)], dim)
    return torch.cat([part.chunk(size, dim)[rank] for part in full.chunk(stride, dim)], dim)
