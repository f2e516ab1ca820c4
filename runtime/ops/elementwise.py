"""Functions of the elements at one index, and dropout.

Dropout does nothing to whole tensors, as in an evaluation; the masks of shards are those of global positions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from megaloom.dsl import Affine, Clamp, Drop, Equals, Pointwise, Value
from megaloom.dsl.sharding_table import SEQUENCES
from megaloom.planner.contract.attention_blocks import local_ranges

from .dropout_masks import MaskSource
from .local_op import LocalOp, TensorFunction
from .registry import local, whole, whole_function
from .tensors import broadcast

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "exp": torch.exp,
    "log": torch.log,
    "reciprocal": torch.reciprocal,
    "sqrt": torch.sqrt,
}
"""Functions of one argument, by their names in the dsl."""
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "div": torch.div,
    "min": torch.minimum,
    "max": torch.maximum,
    "equal": torch.eq,
    "less": torch.lt,
    "less_equal": torch.le,
    "greater": torch.gt,
    "greater_equal": torch.ge,
}
"""Functions of two arguments."""


@whole.register
def _(op: Pointwise, out: Value, *args: Tensor) -> Tensor:
    x, *rest = (broadcast(t, a.shape, out.shape) for t, a in zip(args, out.args, strict=True))
    match op.fn:
        case "add":
            return sum(rest, start=x.float() if x.dtype is torch.bool else x)  # torch would add masks as "or"
        case "mul":
            return reduce(torch.mul, rest, x)
        case "where":
            return torch.where(x.bool(), *rest)
    return BINARY[op.fn](x, *rest) if rest else UNARY[op.fn](x)


@local.register
def _(op: Pointwise, here: LocalOp) -> TensorFunction:
    if op.fn in ("div", "log", "reciprocal", "sqrt") and {"tp", "etp"}.intersection(here.placed.step.axes.values()):
        return partial(_with_ones_in_padding, here)
    return whole_function(here.out)


def _with_ones_in_padding(here: LocalOp, *args: Tensor) -> Tensor:
    """Return a quotient, reciprocal, root or logarithm, with ones in the padding of its last argument.

    Padding is often 0, where the result and its gradient would be infinite, and the product of that and 0 is NaN.
    """
    *others, last = args
    a = here.out.args[-1]
    return whole(here.out.op, here.out, *others, here.fill_padding(a, last, a.shape.names, 1))


@whole.register
def _(op: Affine, out: Value, *args: Tensor) -> Tensor:
    return args[0] * op.scale + op.shift


@whole.register
def _(op: Clamp, out: Value, *args: Tensor) -> Tensor:
    return args[0].clamp(op.low, op.high)


@whole.register
def _(op: Equals, out: Value, *args: Tensor) -> Tensor:
    return args[0] == op.index


@whole.register
def _(op: Drop, out: Value, *args: Tensor) -> Tensor:
    return args[0]


@local.register
def _(op: Drop, here: LocalOp) -> TensorFunction:
    if not op.rate or here.masks is None:
        return whole_function(here.out)
    if not here.placed.step.outer:
        return partial(_by_position, op.rate, here, here.masks)
    # Inside the copies of a layer, such as experts, elements have no global position. There tp ranks draw different
    # masks for shards, and equal masks for a replicated tensor.
    if "tp" in here.placed.sharded_axes:
        return lambda x: here.drop_apart(x, op.rate)
    return lambda x: F.dropout(x, op.rate)


def _by_position(rate: float, here: LocalOp, masks: MaskSource, x: Tensor) -> Tensor:
    """Return this rank's shard of a value after dropout, by the global position of each element."""
    positions = (_global_positions(here, masks, i, n, x.device) for i, n in enumerate(x.shape))
    return masks.drop(x, rate, here.dropout, *positions)


def _global_positions(here: LocalOp, masks: MaskSource, i: int, count: int, device: torch.device) -> Tensor:
    """Return the positions of this rank's shard along dim i of a value, of which it has `count`."""
    name, groups, sharded = here.out.shape.dims[i].name, here.groups, here.placed.sharded_axes
    if name == "batch":
        return masks.samples(count, device)
    axis = here.axis(name)
    if name in SEQUENCES:
        by_tp = "tp" in sharded and "tp" not in here.placed.step.axes.values()
        tp, cp = groups.layout.tp if by_tp else 1, groups.layout.cp if "cp" in sharded else 1
        ranges = local_ranges(count * tp, cp, groups.cp_rank if cp > 1 else 0)
        positions = torch.cat([torch.arange(at.start, at.stop, device=device) for at in ranges])
        return positions.chunk(tp)[groups.tp_rank if tp > 1 else 0]
    first = 0 if axis is None or axis not in sharded else groups.of_axis(axis).rank() * count
    return torch.arange(first, first + count, device=device)
