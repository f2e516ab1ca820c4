"""Routing of tokens to experts in plain torch: the choice of experts, tokens by expert, the sum of expert outputs.

The capacity is the number of token slots that every expert gets. It is that of the busiest expert, so no token is
dropped; slots that an expert does not need hold tokens with gate 0. Where each device of ep has some of the experts, it
is that of the busiest expert of all devices of ep and etp, so that all messages have one size.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megaloom.dsl import Combine, Gate, Route, Value

from .local_op import LocalOp, TensorFunction
from .registry import local, whole, whole_function
from .tensors import broadcast, dim_index, names


@whole.register
def _(op: Gate, out: Value, *args: Tensor) -> Tensor:
    raw, *correction = args
    last = [*names(out.shape.without("experts")), "experts"]
    raw = broadcast(raw, out.shape, last)
    experts, weights = top_k_experts(op, raw, *correction)
    return broadcast(torch.zeros_like(raw).scatter(-1, experts, weights), last, out.shape)


@whole.register
def _(op: Route, out: Value, *args: Tensor) -> Tensor:
    return _tokens_by_expert(out, *args, capacity=int(_expert_capacity(out, args[1])))


@whole.register
def _(op: Combine, out: Value, *args: Tensor) -> Tensor:
    return _combined(out, *args, capacity=int(_expert_capacity(out, args[1])))


@local.register
def _(op: Route | Combine, here: LocalOp) -> TensorFunction:
    if here.groups.layout.ep * here.groups.layout.etp == 1:
        return whole_function(here.out)
    return partial(_dispatch if isinstance(op, Route) else _combine, here)


def _dispatch(here: LocalOp, x: Tensor, gate: Tensor) -> Tensor:
    """Return the tokens of this device's experts: [experts, ep * capacity, embed], ordered by the sending device."""
    received = here.exchange_over_ep(_tokens_by_expert(here.out, x, gate, capacity=_common_capacity(here, gate)))
    return received.unflatten(0, (here.groups.layout.ep, -1)).transpose(0, 1).flatten(1, 2)


def _combine(here: LocalOp, y: Tensor, gate: Tensor) -> Tensor:
    """Return the weighted sum of expert outputs for each of this device's tokens.

    y: the outputs of this device's experts, [experts, ep * capacity, embed].
    """
    sent = y.unflatten(1, (here.groups.layout.ep, -1)).transpose(0, 1).flatten(0, 1)
    return _combined(here.out, here.exchange_over_ep(sent), gate, capacity=_common_capacity(here, gate))


def _common_capacity(here: LocalOp, gate: Tensor) -> int:
    """Return the largest expert capacity of all devices of ep and etp."""
    capacity = _expert_capacity(here.out, gate)
    dist.all_reduce(capacity, dist.ReduceOp.MAX, group=here.groups.collection.tp_ep)
    return int(capacity)


def top_k_experts(op: Gate, raw: Tensor, *correction: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts of each token and their weights, each [.., top_k], from router logits [.., experts]."""
    scores = raw.softmax(-1) if op.score == "softmax" else raw.sigmoid()
    choice = scores + correction[0] if correction else scores
    if op.groups > 1:
        grouped = choice.unflatten(-1, (op.groups, -1))
        group_scores = grouped.topk(op.best, -1).values.sum(-1)
        allowed = torch.zeros_like(group_scores).scatter(-1, group_scores.topk(op.top_groups, -1).indices, 1.0)
        choice = grouped.masked_fill(allowed[..., None] == 0, -torch.inf).flatten(-2)
    experts = choice.topk(op.top_k, -1).indices
    weights = scores.gather(-1, experts)
    if op.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights * op.scale


def _expert_capacity(out: Value, gate: Tensor) -> Tensor:
    """Return the number of tokens of the busiest expert, a scalar. out: the Route or Combine that reads the gate."""
    return (_gate_by_expert(gate, out.args[1]) != 0).sum(1).max()


def _tokens_by_expert(out: Value, x: Tensor, gate: Tensor, *, capacity: int) -> Tensor:
    """Return the result of a Route, the tokens of each expert: [experts, capacity, embed]."""
    x = broadcast(x, out.args[0].shape, [*_token_dims(out.args[1]), out.shape.dims[-1].name])
    return x.flatten(0, -2)[_token_slots(_gate_by_expert(gate, out.args[1]), capacity)]


def _combined(out: Value, y: Tensor, gate: Tensor, *, capacity: int) -> Tensor:
    """Return the result of a Combine, the sum of expert outputs weighted by the gate: the token dims, then embed.

    y: the outputs of the experts, [experts, capacity, embed].
    """
    sizes = [gate.shape[dim_index(out.args[1].shape, name)] for name in _token_dims(out.args[1])]
    gate = _gate_by_expert(gate, out.args[1])
    tokens = _token_slots(gate, capacity)
    y = y * gate.gather(1, tokens)[..., None]
    sums = y.new_zeros(gate.shape[1], y.shape[-1]).index_add(0, tokens.flatten(), y.flatten(0, 1))
    return sums.unflatten(0, sizes)


def _token_dims(gate: Value) -> list[str]:
    """Return the dims that index tokens, such as batch and seq."""
    return names(gate.shape.without("experts"))


def _gate_by_expert(gate: Tensor, value: Value) -> Tensor:
    """Return the gate as [experts, tokens]."""
    return broadcast(gate, value.shape, ["experts", *_token_dims(value)]).flatten(1)


def _token_slots(gate: Tensor, capacity: int) -> Tensor:
    """Return the index of the token in each slot, [experts, capacity], from a gate [experts, tokens].

    A slot that an expert does not need holds a token that did not choose the expert: its gate is 0, so it adds nothing.
    """
    return (gate != 0).int().argsort(dim=1, descending=True, stable=True)[:, :capacity]
