"""Sums over dims: products of two tensors, and sums of one."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from megaloom.dsl import Dot, Sum, Value

from .local_op import LocalOp, TensorFunction
from .registry import local, whole, whole_function
from .tensors import dim_index, product


@whole.register
def _(op: Dot, out: Value, *args: Tensor) -> Tensor:
    x, w = out.args
    return product(args[0], x.shape.names, args[1], w.shape.names, out.shape.names)


@whole.register
def _(op: Sum, out: Value, *args: Tensor) -> Tensor:
    return args[0].float().sum([dim_index(out.args[0].shape, name) for name in op.over])


@local.register(Dot)
@local.register(Sum)
def _(op: Dot | Sum, here: LocalOp) -> TensorFunction:
    if any(here.axis(d) in ("tp", "etp") for d in op.over):  # of any degree
        return partial(_without_padding, here, op.over)
    return whole_function(here.out)


def _without_padding(here: LocalOp, over: tuple[str, ...], *args: Tensor) -> Tensor:
    """Return a sum over the dims `over`, with zeros in the padding of each argument, so that it adds nothing.

    A layout pads a vocabulary on a single device too, and what is computed from padding may be infinite.
    """
    masked = (here.fill_padding(a, x, over, 0) for a, x in zip(here.out.args, args, strict=True))
    return whole(here.out.op, here.out, *masked)
