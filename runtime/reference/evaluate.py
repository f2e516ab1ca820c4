"""Evaluation of each primitive op of the dsl in plain torch.

The dims of every tensor are in the order of its `Value.shape`. The code is written for clarity, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce, singledispatch

import torch
import torch.nn.functional as F
from torch import Tensor

from megaloom.dsl import (
    Affine,
    Attend,
    Clamp,
    Combine,
    Concat,
    Conv,
    CrossEntropy,
    DocumentPositions,
    Dot,
    Drop,
    Equals,
    Gate,
    Inside,
    LogSumExp,
    Lookup,
    LossSums,
    MaskedScatter,
    Normalize,
    Op,
    Patches,
    Pointwise,
    PositionLookup,
    Rename,
    Rope,
    Route,
    Scan,
    Select,
    Shift,
    Slice,
    StackLosses,
    Sum,
    UserError,
    Value,
)

from .attention import attention
from .rotary import rotate
from .routing import (
    combine_expert_outputs,
    expert_capacity,
    tokens_by_expert,
    top_k_experts,
)
from .sequence import convolution, scan
from .tensors import (
    broadcast,
    dim_index,
    document_positions,
    names,
    product,
)

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


@singledispatch
def evaluate(op: Op, out: Value, *args: Tensor) -> Tensor:
    """Return the value `out` of an op for these arguments, with its dims in the order of `out.shape`.

    Register a function for your own op with `@evaluate.register`.
    """
    raise UserError(f"no evaluation of the op {type(op).__name__}: write one and decorate it with @evaluate.register")


@evaluate.register
def _(op: Dot, out: Value, *args: Tensor) -> Tensor:
    x, w = out.args
    return product(args[0], x.shape.names, args[1], w.shape.names, out.shape.names)


@evaluate.register
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


@evaluate.register
def _(op: Drop, out: Value, *args: Tensor) -> Tensor:
    return args[0]


@evaluate.register
def _(op: Affine, out: Value, *args: Tensor) -> Tensor:
    return args[0] * op.scale + op.shift


@evaluate.register
def _(op: Clamp, out: Value, *args: Tensor) -> Tensor:
    return args[0].clamp(op.low, op.high)


@evaluate.register
def _(op: Normalize, out: Value, *args: Tensor) -> Tensor:
    x, *weights = args
    order = [*names(out.shape.without(*op.over)), *op.over]
    flat = broadcast(x, out.shape, order).flatten(-len(op.over)).unflatten(-1, (op.groups, -1))
    if op.centred:
        flat = flat - flat.mean(-1, keepdim=True)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + op.eps)
    y = flat.flatten(-2).unflatten(-1, [x.shape[dim_index(out.shape, name)] for name in op.over])
    y = broadcast(y, order, out.shape)
    for combine, w, a in zip((torch.mul, torch.add), weights, out.args[1:], strict=False):
        y = combine(y, broadcast(w, a.shape, out.shape))
    return y


@evaluate.register
def _(op: Lookup, out: Value, *args: Tensor) -> Tensor:
    indices, table = args
    return table.movedim(dim_index(out.args[1].shape, op.key), 0)[indices]


@evaluate.register
def _(op: PositionLookup, out: Value, *args: Tensor) -> Tensor:
    x, table = args
    count = x.shape[dim_index(out.args[0].shape, out.shape.dims[0].name)]
    rows = table.movedim(dim_index(out.args[1].shape, op.key), 0)
    if count + op.offset > len(rows):
        longest = len(rows) - op.offset
        raise UserError(f"a table {out.args[1].shape} has no rows for {count} positions: seq can be up to {longest}")
    return rows[op.offset : op.offset + count]


@evaluate.register
def _(op: Rope, out: Value, *args: Tensor) -> Tensor:
    return rotate(op, out.shape, *args)


@evaluate.register
def _(op: Attend, out: Value, *args: Tensor) -> Tensor:
    return attention(op, out, *args)


@evaluate.register
def _(op: Gate, out: Value, *args: Tensor) -> Tensor:
    raw, *correction = args
    last = [*names(out.shape.without("experts")), "experts"]
    raw = broadcast(raw, out.shape, last)
    experts, weights = top_k_experts(op, raw, *correction)
    return broadcast(torch.zeros_like(raw).scatter(-1, experts, weights), last, out.shape)


@evaluate.register
def _(op: Route, out: Value, *args: Tensor) -> Tensor:
    return tokens_by_expert(out, *args, capacity=int(expert_capacity(out, args[1])))


@evaluate.register
def _(op: Combine, out: Value, *args: Tensor) -> Tensor:
    return combine_expert_outputs(out, *args, capacity=int(expert_capacity(out, args[1])))


@evaluate.register
def _(op: Rename, out: Value, *args: Tensor) -> Tensor:
    return args[0]


@evaluate.register
def _(op: Conv, out: Value, *args: Tensor) -> Tensor:
    return convolution(op, out, *args)


@evaluate.register
def _(op: Scan, out: Value, *args: Tensor) -> Tensor:
    return scan(op, out, *args)


@evaluate.register
def _(op: Shift, out: Value, *args: Tensor) -> Tensor:
    (x,) = args
    along = dim_index(out.shape, op.along)
    remaining = max(x.shape[along] - abs(op.by), 0)
    shifted = x.narrow(along, max(op.by, 0) if remaining else 0, remaining)
    zeros = torch.zeros_like(x.narrow(along, 0, x.shape[along] - remaining))
    return torch.cat((shifted, zeros) if op.by > 0 else (zeros, shifted), along)


@evaluate.register
def _(op: Slice, out: Value, *args: Tensor) -> Tensor:
    return args[0].narrow(dim_index(out.shape, op.dim), op.start, op.stop - op.start)


@evaluate.register
def _(op: Select, out: Value, *args: Tensor) -> Tensor:
    assert op.index is not None, "a Select without an index is evaluated with the copies of its Each"
    return args[0].select(dim_index(out.args[0].shape, op.dim), op.index)


@evaluate.register
def _(op: Concat, out: Value, *args: Tensor) -> Tensor:
    parts = [broadcast(t, a.shape, out.shape) for t, a in zip(args, out.args, strict=True)]
    along, sizes = dim_index(out.shape, op.over), [max(each) for each in zip(*(p.shape for p in parts), strict=True)]
    return torch.cat([p.expand(*sizes[:along], p.shape[along], *sizes[along + 1 :]) for p in parts], along)


@evaluate.register
def _(op: Patches, out: Value, *args: Tensor) -> Tensor:
    x = broadcast(args[0], out.args[0].shape, ["batch", "channels", "height", "width"])
    return F.unfold(x, op.size, stride=op.size).transpose(1, 2)


@evaluate.register
def _(op: MaskedScatter, out: Value, *args: Tensor) -> Tensor:
    x, y, tokens = args
    positions, vectors = int((tokens == op.token).sum()), y.shape[0] * y.shape[1]
    if positions != vectors:
        raise UserError(
            f"{vectors} vectors for {positions} positions: the tokens must have {op.token} once for each vector"
        )
    mask = broadcast(tokens == op.token, out.args[2].shape, out.shape)
    y = broadcast(y, out.args[1].shape, ["batch", out.args[1].shape.positions("embed").name, "embed"])
    return x.masked_scatter(mask.expand_as(x), y.to(x.dtype))


@evaluate.register
def _(op: DocumentPositions, out: Value, *args: Tensor) -> Tensor:
    (indices,) = args
    return op.first + document_positions(indices, dim_index(out.shape, op.along))


@evaluate.register
def _(op: Inside, out: Value, *args: Tensor) -> Tensor:
    (x,) = args
    count = x.shape[dim_index(out.shape, op.along)]
    position = torch.arange(count, device=x.device) + op.by
    inside = broadcast((position >= 0) & (position < count), [op.along], out.shape)
    return inside.expand(x.shape)


@evaluate.register
def _(op: CrossEntropy, out: Value, *args: Tensor) -> Tensor:
    logits = args[0].movedim(dim_index(out.args[0].shape, op.over), -1)
    labels = broadcast(args[1], out.args[1].shape, out.shape)
    return logits.float().logsumexp(-1) - logits.gather(-1, labels[..., None])[..., 0].float()


@evaluate.register
def _(op: LogSumExp, out: Value, *args: Tensor) -> Tensor:
    return args[0].float().logsumexp(dim_index(out.args[0].shape, op.over))


@evaluate.register
def _(op: Sum, out: Value, *args: Tensor) -> Tensor:
    return args[0].float().sum([dim_index(out.args[0].shape, name) for name in op.over])


@evaluate.register
def _(op: Equals, out: Value, *args: Tensor) -> Tensor:
    return args[0] == op.index


@evaluate.register
def _(op: LossSums, out: Value, *args: Tensor) -> Tensor:
    losses = args[0].double()
    weights = torch.ones_like(losses)
    if len(args) > 1:
        weights = broadcast(args[1], out.args[1].shape, out.args[0].shape).double().expand_as(losses)
    return torch.stack([(losses * weights).sum(), weights.sum()])


@evaluate.register
def _(op: StackLosses, out: Value, *args: Tensor) -> Tensor:
    return torch.stack(args)
