"""Which experts tokens go to, and how they get there and back, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from megaloom.dsl import Gate, Value

from .tensors import axis, broadcast, names


def top_k_experts(op: Gate, raw: Tensor, *correction: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of each token, and their weights: [.. top_k] twice, from scores [.. experts]."""
    scores = raw.softmax(-1) if op.score == "softmax" else raw.sigmoid()
    choice = scores + correction[0] if correction else scores
    if op.groups > 1:
        grouped = choice.unflatten(-1, (op.groups, -1))
        of_group = grouped.topk(op.best, -1).values.sum(-1)
        open_ = torch.zeros_like(of_group).scatter(-1, of_group.topk(op.top_groups, -1).indices, 1.0)
        choice = grouped.masked_fill(open_[..., None] == 0, -torch.inf).flatten(-2)
    which = choice.topk(op.top_k, -1).indices
    weights = scores.gather(-1, which)
    if op.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return which, weights * op.scale


def busiest(out: Value, gate: Tensor) -> Tensor:
    """How many tokens the expert gets that most go to, for the gate of a Route or Combine."""
    return (_by_expert(gate, out.args[1]) != 0).sum(1).max()


def routed(out: Value, x: Tensor, gate: Tensor, *, slots: int) -> Tensor:
    """The tokens of each expert, as a Route of so many slots gives them."""
    x = broadcast(x, out.args[0].shape, [*_tokens(out.args[1]), "embed"])
    return x.flatten(0, -2)[_slots(_by_expert(gate, out.args[1]), slots)]


def combined(out: Value, y: Tensor, gate: Tensor, *, slots: int) -> Tensor:
    """What a Combine of so many slots makes of the experts' results."""
    sizes = [gate.shape[axis(out.args[1].shape, name)] for name in _tokens(out.args[1])]
    gate = _by_expert(gate, out.args[1])
    which = _slots(gate, slots)
    y = y * gate.gather(1, which)[..., None]
    sums = y.new_zeros(gate.shape[1], y.shape[-1]).index_add(0, which.flatten(), y.flatten(0, 1))
    return sums.unflatten(0, sizes)


def _tokens(gate: Value) -> list[str]:
    """The dims that tell one token from another."""
    return names(gate.shape.without("experts"))


def _by_expert(gate: Tensor, value: Value) -> Tensor:
    """The gate as [experts tokens]."""
    return broadcast(gate, value.shape, ["experts", *_tokens(value)]).flatten(1)


def _slots(gate: Tensor, count: int) -> Tensor:
    """The tokens of each expert, [experts slots], from a gate [experts tokens].

    An expert has as many slots as the busiest one needs. Those it does not need itself hold tokens that it was not
    chosen for: their gate is zero, so they add nothing.
    """
    return (gate != 0).int().argsort(dim=1, descending=True, stable=True)[:, :count]
