"""What primitives compute of this rank's parts of tensors, where that is not what they compute of whole ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from attrs import evolve
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megaloom.dsl import (
    Attend,
    Combine,
    Dim,
    Dot,
    Drop,
    Gate,
    Lookup,
    MoE,
    Normalize,
    Route,
    Scan,
    Value,
)
from megaloom.dsl.facts.primitives import Program, Step
from megaloom.dsl.facts.propagation import PlacedOp, Transition, TransitionKind
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.reference.evaluate import evaluate
from megaloom.runtime.reference.tensors import axis, broadcast, names

from .balancing_loss import balancing_loss
from .dispatch import back, there
from .transitions import perform


def local(p: PlacedOp, v: Value, *args: Tensor, groups: ProcessGroups, training: bool, mixture: MoE | None) -> Tensor:
    """What a primitive computes of local tensors. mixture: the MoE whose balancing loss is to be added."""
    match v.op:
        case Drop(rate):
            return _dropped(args[0], rate, training, apart="tp" in p.parts)
        case Gate() if mixture and training and not p.step.outer:
            sharing = [groups.of_axis(name) for name in sorted(p.parts)]
            return _balanced(mixture, v, evaluate(v.op, v, *args), args[0], sharing)
        case Route() if groups.layout.ep * groups.layout.etp > 1:
            return there(v, *args, groups=groups)
        case Combine() if groups.layout.ep * groups.layout.etp > 1:
            return back(v, *args, groups=groups)
        case Dot(over):
            x = _zero_padding(p.step, v.args[0], args[0], over, groups)
            return evaluate(v.op, v, x, *args[1:])
        case Lookup(key) if p.step.axes.get(key) == "tp" and groups.layout.tp > 1:
            return _looked_up(v.op, v, *args, rank=groups.tp_rank)
        case Normalize() if p.summed:
            return _normalized(v.op, v, p, *args, groups=groups)
        case Normalize(over) if v.op.groups > 1 and not p.result:  # whole groups are here
            degree = groups.layout.degrees.get(p.step.axes.get(over[0], ""), 1)
            return evaluate(evolve(v.op, groups=v.op.groups // degree), v, *args)
        case Attend() | Scan() if torch.is_grad_enabled():
            run = partial(evaluate, v.op, v)
            return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
    return evaluate(v.op, v, *args)


def _zero_padding(step: Step, v: Value, x: Tensor, over: tuple[str, ...], groups: ProcessGroups) -> Tensor:
    """Return a value with zeros in the padding of the dims `over`, so that a sum over them leaves the padding out."""
    for i, d in enumerate(v.shape):
        if d.name in over and step.axes.get(d.name) in ("tp", "etp"):
            x = x if (padding := _padding(d, x, i, step.axes[d.name], groups)) is None else x.masked_fill(padding, 0)
    return x


def hide_padding(p: Program, logits: Tensor, groups: ProcessGroups) -> Tensor:
    """Return local logits with the lowest number in the columns that only pad the vocabulary."""
    i = axis(p.value.shape, "vocab")
    divided = p.table.axis(p.value.shape["vocab"]) == "tp"
    padding = _padding(p.value.shape["vocab"], logits, i, "tp", groups) if divided else None
    return logits if padding is None else logits.masked_fill(padding, torch.finfo(logits.dtype).min)


def _padding(d: Dim, x: Tensor, i: int, axis: str, groups: ProcessGroups) -> Tensor | None:
    """Return a mask of the padding in this rank's shard of dim `i` of a tensor; None if there is none."""
    group = groups.of_axis(axis)
    if x.shape[i] * group.size() == d.known:
        return None
    index = torch.arange(x.shape[i], device=x.device) + group.rank() * x.shape[i]
    return (index >= d.known).view([-1 if k == i else 1 for k in range(x.ndim)])


def _balanced(op: MoE, v: Value, gate: Tensor, scores: Tensor, groups: list[Any]) -> Tensor:
    """The gate as it is; its gradient brings that of the balancing loss along."""
    order = [*names(v.shape.without("experts")), "experts"]
    taken, rows = (
        broadcast(x, a.shape, order).flatten(0, -2) for x, a in ((gate.detach() != 0, v), (scores, v.args[0]))
    )
    return MoEAuxLossAutoScaler.apply(gate, balancing_loss(op, taken, rows, groups))  # type: ignore[no-any-return]


def _dropped(x: Tensor, rate: float, training: bool, *, apart: bool) -> Tensor:
    """Ranks that hold parts of a tensor each draw from their own state, others all alike."""
    if not (rate and training):
        return x
    if not apart:
        return F.dropout(x, rate)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return F.dropout(x, rate)


def _looked_up(op: Lookup, v: Value, indices: Tensor, table: Tensor, *, rank: int) -> Tensor:
    """The rows of this rank's share of a table, zeros for those that others have."""
    rows = table.shape[axis(v.args[1].shape, op.key)]
    mine = indices - rank * rows
    here = (mine >= 0) & (mine < rows)
    found = evaluate(op, v, mine.where(here, 0), table)
    return found * here[(..., *(None for _ in range(found.ndim - here.ndim)))]


def _normalized(op: Normalize, v: Value, p: PlacedOp, x: Tensor, *weights: Tensor, groups: Any) -> Tensor:
    """A norm over dims that lie in parts: sums of all ranks, whose gradients are summed as well."""
    places = [axis(v.shape, name) for name in op.over]

    def mean(t: Tensor) -> Tensor:
        t = t.mean(places, keepdim=True)
        for name in p.summed:
            t = perform(Transition(TransitionKind.REDUCE_PARTIAL, name), t / groups.layout.degrees[name], None, groups)
            t = perform(Transition(TransitionKind.TO_REPLICATE, name), t, None, groups)
        return t

    if op.centred:
        x = x - mean(x)
    y = x * torch.rsqrt(mean(x.square()) + op.eps)
    for combine, w, a in zip((torch.mul, torch.add), weights, v.args[1:], strict=False):
        y = combine(y, broadcast(w, a.shape, names(v.shape)))
    return y
