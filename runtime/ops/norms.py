"""Norms: by torch's kernels where the normalized dims are whole here, and else with means over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor

from megaloom.dsl import Normalize, Value
from megaloom.dsl.facts.placement import PARTIAL, REPLICATE, Transition

from .local_op import LocalOp, TensorFunction
from .registry import local, whole
from .tensors import broadcast, dim_index, names


@whole.register
def _(op: Normalize, out: Value, *args: Tensor) -> Tensor:
    x, *weights = args
    order = [*names(out.shape.without(*op.over)), *op.over]
    flat = broadcast(x, out.shape, order).flatten(-len(op.over)).unflatten(-1, (op.groups, -1))
    if op.centred:
        flat = flat - flat.mean(-1, keepdim=True)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + op.eps)
    y = flat.flatten(-2).unflatten(-1, [x.shape[dim_index(out.shape, name)] for name in op.over])
    return _scaled(broadcast(y, order, out.shape), out, weights)


def _scaled(y: Tensor, out: Value, weights: Sequence[Tensor]) -> Tensor:
    """Return y times the first weight, plus the second one, where the norm has them."""
    for combine, w, a in zip((torch.mul, torch.add), weights, out.args[1:], strict=False):
        y = combine(y, broadcast(w, a.shape, out.shape))
    return y


@local.register
def _(op: Normalize, here: LocalOp) -> TensorFunction:
    if here.placed.statistics_axes:
        return partial(_over_ranks, op, here)
    if op.groups > 1 and not here.placed.result:  # this rank has whole groups
        degree = here.groups.layout.degrees.get(here.axis(op.over[0]) or "", 1)
        op = evolve(op, groups=op.groups // degree)
    return partial(_by_kernel, op, here.out)


def _by_kernel(op: Normalize, out: Value, x: Tensor, *weights: Tensor) -> Tensor:
    """Return a norm over dims that are whole here: by torch's kernel where they are the last ones."""
    if out.shape.names[-len(op.over) :] != op.over:
        return whole(op, out, x, *weights)
    if op.groups == 1:
        return _kernel(op, x, len(op.over), *weights)
    return _scaled(_kernel(op, x.flatten(-len(op.over)).unflatten(-1, (op.groups, -1)), 1).view_as(x), out, weights)


def _kernel(op: Normalize, x: Tensor, dims: int, *weights: Tensor) -> Tensor:
    scale, shift = (*weights, None, None)[:2]
    if op.centred:
        return F.layer_norm(x, x.shape[-dims:], scale, shift, op.eps)
    y = F.rms_norm(x, x.shape[-dims:], scale, op.eps)
    return y if shift is None else y + shift


def _over_ranks(op: Normalize, here: LocalOp, x: Tensor, *weights: Tensor) -> Tensor:
    """Return a norm over sharded dims: its means, and their gradients, are reduced over the ranks."""
    dims, degrees = [dim_index(here.out.shape, name) for name in op.over], here.groups.layout.degrees

    def mean(t: Tensor) -> Tensor:
        t = t.mean(dims, keepdim=True)
        for name in here.placed.statistics_axes:
            t = here.perform(Transition(name, PARTIAL, REPLICATE), t / degrees[name])
        return t

    if op.centred:
        x = x - mean(x)
    return _scaled(x * torch.rsqrt(mean(x.square()) + op.eps), here.out, weights)
