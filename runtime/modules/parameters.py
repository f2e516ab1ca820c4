"""Conversion of the weights of a model to the parameters of its modules, and to this rank's shards of them.

In the model, weights have layout-independent names (`attention.3.q`) and full shapes. `parameters` computes from them
the full parameters of a megatron-core module, as `planner.contract.module_kinds` lists them, and `rank_shard` this
rank's shard of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from attrs import evolve, frozen
from torch import Tensor

from megaloom.dsl import MoE, Node, Op, Slot, UserError, Value
from megaloom.planner.contract.module_kinds import (
    LOCAL_EXPERTS,
    STACKED_EXPERTS,
    Parameter,
    module_kind,
    module_parameters,
)
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
    experts: range  # the experts whose parameters are wanted

    @classmethod
    def of(cls, node: Node, draw: Draw, experts: range | None = None) -> Weights:
        """Return the weights of a node, by default of all its experts."""
        count = node.op.experts if isinstance(node.op, MoE) else 0
        return cls(local_slots(node), draw, range(count) if experts is None else experts)

    def __call__(self, name: str) -> Any:
        """Return the full weight of this name, as a tensor or a view."""
        return self.draw(self.slots[name], None)

    def parameter(self, p: Parameter, expert: int | None = None) -> Any:
        """Return a parameter [rows, columns], or [rows], of a module, or that of one expert."""
        parts = [self._rows_first(name, p.columns, expert) for name in p.weights]
        if p.by_head:
            heads = min(part.shape[0] for part in parts)
            parts = [part.unflatten(0, (heads, part.shape[0] // heads)) for part in parts]
        joined = torch.cat(parts, int(p.by_head)) if len(parts) > 1 else parts[0]
        split = joined.ndim - len(p.columns)
        return joined.flatten(split).flatten(0, split - 1) if p.columns else joined.flatten()

    def stacked_parameter(self, p: Parameter) -> Any:
        """Return a parameter of all wanted experts: the rows of each, one expert after the other."""
        whole = [self._rows_first(name, p.columns) for name in p.weights]  # [experts, rows, columns]
        parts = [part.narrow(0, self.experts.start, len(self.experts)) for part in whole]
        return (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).flatten(0, 1)

    def _rows_first(self, name: str | Value, columns: tuple[str, ...], expert: int | None = None) -> Any:
        """Return a weight, or that of one expert, with the dims of a row last."""
        slot = self.slots[name] if isinstance(name, str) else next(s for s in self.slots.values() if s.value is name)
        dims = [d.name for d in (slot.dims if expert is None else slot.value.shape.dims)]
        order = (*(n for n in dims if n not in columns), *columns)
        return self.draw(slot, expert).permute(*map(dims.index, order))


def local_slots(node: Node) -> dict[str, Slot]:
    """Return the weights of a node by their names in the layer."""
    return {s.name.removeprefix(f"{node.name}."): s for s in node.weights}


def parameters(op: Op, w: Weights, *, stacked_experts: bool = False) -> Parameters:
    """Return the full parameters, by name, of the module that `registry.build_module` builds for an op.

    stacked_experts: one parameter has the rows of all experts.

    Those of a module of megatron-core are rearrangements of weights, so they serve tensors and views. A layer with its
    own torch module has a method `parameters(self, w)`, which gets tensors in host memory and may compute
    anything. Raise UserError if it is missing.
    """
    own = None if is_built_in(op) else getattr(op, "parameters", None)
    if own is not None:
        return dict(own(evolve(w, draw=lambda slot, index: values_of(w.draw(slot, index)).cpu())))
    if module_kind(op) is None:
        raise UserError(
            f"{op} has its own torch module, but no method that computes the module's parameters\n"
            "write a method parameters(self, w) that returns them by name, such as {'weight': w('up').T}"
        )
    rows = module_parameters(op)
    out = {p.name: w.parameter(p) for p in rows if not p.of_expert}
    if stacked_experts:
        return out | {f"{STACKED_EXPERTS}{p.name}": w.stacked_parameter(p) for p in rows if p.of_expert}
    for local, expert in enumerate(w.experts):
        out |= {f"{LOCAL_EXPERTS}{local}.{p.name}": w.parameter(p, expert) for p in rows if p.of_expert}
    return out


def is_built_in(op: Op) -> bool:
    """Return whether the parameters of an op's module are rearrangements, not computed by a method of a user's own."""
    kind = module_kind(op)
    return kind is not None and kind.runs is not None


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
