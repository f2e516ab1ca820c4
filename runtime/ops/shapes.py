"""Slices, joins, renamed dims, patches of images, and vectors scattered to tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megaloom.dsl import Concat, MaskedScatter, Patches, Rename, Select, Slice, UserError, Value

from .registry import whole
from .tensors import broadcast, dim_index


@whole.register
def _(op: Rename, out: Value, *args: Tensor) -> Tensor:
    return args[0]


@whole.register
def _(op: Slice, out: Value, *args: Tensor) -> Tensor:
    return args[0].narrow(dim_index(out.shape, op.dim), op.start, op.stop - op.start)


@whole.register
def _(op: Select, out: Value, *args: Tensor) -> Tensor:
    assert op.index is not None, "a Select without an index is evaluated with the copies of its Each"
    return args[0].select(dim_index(out.args[0].shape, op.dim), op.index)


@whole.register
def _(op: Concat, out: Value, *args: Tensor) -> Tensor:
    parts = [broadcast(t, a.shape, out.shape) for t, a in zip(args, out.args, strict=True)]
    along, sizes = dim_index(out.shape, op.over), [max(each) for each in zip(*(p.shape for p in parts), strict=True)]
    return torch.cat([p.expand(*sizes[:along], p.shape[along], *sizes[along + 1 :]) for p in parts], along)


@whole.register
def _(op: Patches, out: Value, *args: Tensor) -> Tensor:
    x = broadcast(args[0], out.args[0].shape, ["batch", "channels", "height", "width"])
    return F.unfold(x, op.size, stride=op.size).transpose(1, 2)


@whole.register
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
