"""Sums over dims: products of two tensors, and sums of one."""

from __future__ import annotations

from torch import Tensor

from megaloom.dsl import Dot, Sum, Value

from .registry import whole
from .tensors import dim_index, product


@whole.register
def _(op: Dot, out: Value, *args: Tensor) -> Tensor:
    x, w = out.args
    return product(args[0], x.shape.names, args[1], w.shape.names, out.shape.names)


@whole.register
def _(op: Sum, out: Value, *args: Tensor) -> Tensor:
    return args[0].float().sum([dim_index(out.args[0].shape, name) for name in op.over])
