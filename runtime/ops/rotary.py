"""Rotary positions: pairs of channels rotated by an angle that grows with the position.

On GPUs `torch.compile` makes one kernel forward and one backward.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from megaloom.dsl import Rope, Shape, Value
from megaloom.dsl.ops.attention_core import sequence_dim
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.fused_loss import compiled

from .kv_cache import OpState, Rows
from .local_op import LocalOp, TensorFunction
from .registry import NextPosition, local, next_position, whole
from .tensors import broadcast, dim_index


@whole.register
def _(op: Rope, out: Value, *args: Tensor) -> Tensor:
    (x,) = args
    return rotated(x, *_rotation(op, out.shape, x), dim_index(out.shape, "head_dim"), op.interleaved)


@local.register
def _(op: Rope, here: LocalOp) -> TensorFunction:
    return partial(_rotate_by_kernel, op, here.out.shape)


@next_position.register
def _(op: Rope, here: LocalOp) -> NextPosition:
    shape = here.out.shape
    dims, dim = ["batch", sequence_dim(shape).name, "head_dim"], dim_index(shape, "head_dim")
    angles = _frequencies(op, op.rotated_channels(shape), device.current())

    def step(rows: Rows, state: OpState | None, args: tuple[Tensor, ...]) -> Tensor:
        (x,) = args

        def rotation() -> list[Tensor]:
            return [broadcast(t, dims, shape) for t in _rotation_at(op, angles, rows.positions, x.dtype)]

        cos, sin = rows.once((id(angles), op.magnitude, shape.names, x.dtype), rotation)
        return rotated(x, cos, sin, dim, op.interleaved)

    return step


def _rotation(op: Rope, shape: Shape, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of x, at positions from 0 on. They have its dims, but half the rotated channels."""
    seq = sequence_dim(shape).name
    found = _shared_rotation(op, op.rotated_channels(shape), x.shape[dim_index(shape, seq)], x.dtype, x.device)
    cos, sin = (broadcast(t, [seq, "head_dim"], shape) for t in found)
    return cos, sin


def rotated(x: Tensor, cos: Tensor, sin: Tensor, dim: int, interleaved: bool) -> Tensor:
    """Return x with the first channels of `dim` rotated in pairs, by cosines and sines of one element for each pair."""
    n = 2 * cos.shape[dim]
    if n < x.shape[dim]:
        first, rest = x.split([n, x.shape[dim] - n], dim)
        return torch.cat((rotated(first, cos, sin, dim, interleaved), rest), dim)
    pair_dim = dim + 1 if interleaved else dim  # index of the dim that holds the two channels of a pair
    a, b = x.unflatten(dim, (-1, 2) if interleaved else (2, -1)).unbind(pair_dim)
    pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), pair_dim)
    return pairs.flatten(dim, dim + 1)


@lru_cache(maxsize=32)
def _shared_rotation(
    op: Rope, channels: int, count: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, channels / 2], which all layers share."""
    return _rotation_at(op, _frequencies(op, channels, device), torch.arange(count, device=device), dtype)


def _rotation_at(op: Rope, each: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [.., channels / 2] of positions [..]. each: the `_frequencies`."""
    angles = positions[..., None].double() * each
    return (angles.cos() * op.magnitude).to(dtype), (angles.sin() * op.magnitude).to(dtype)


@lru_cache(maxsize=32)
def _frequencies(op: Rope, channels: int, device: torch.device) -> Tensor:
    """Return the angle between neighbouring positions of each pair of channels, float64 [channels / 2]."""
    return torch.tensor(op.frequencies(channels), device=device, dtype=torch.float64)


def _rotate_by_kernel(op: Rope, shape: Shape, x: Tensor) -> Tensor:
    """Return x with its pairs of channels rotated by position."""
    out: Tensor = _Rotate.apply(x, *_rotation(op, shape, x), dim_index(shape, "head_dim"), op.interleaved)
    return out


class _Rotate(torch.autograd.Function):
    """Autograd function of `_rotate_by_kernel`. The gradient is rotated by the negative angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, dim: int, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.pairs = dim, interleaved
        return compiled(rotated)(x, cos, sin, *ctx.pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return compiled(rotated)(*gradients, cos, -sin, *ctx.pairs), None, None, None, None
