"""Rotary positions: pairs of channels rotated by an angle that grows with the position."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from megaloom.dsl import Rope, Shape
from megaloom.dsl.ops.attention_core import sequence_dim

from .tensors import broadcast, dim_index


def rotate(op: Rope, shape: Shape, x: Tensor) -> Tensor:
    """Return x rotated by the positions from 0 on."""
    return rotated(x, *rotation(op, shape, x), dim_index(shape, "head_dim"), op.interleaved)


def rotation(op: Rope, shape: Shape, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of x, at positions from 0 on. They have its dims, but half the rotated channels."""
    seq = sequence_dim(shape).name
    found = _rotation(op, op.rotated_channels(shape), x.shape[dim_index(shape, seq)], x.dtype, x.device)
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
def _rotation(op: Rope, channels: int, count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, channels / 2], which all layers share."""
    return rotation_at(op, frequencies(op, channels, device), torch.arange(count, device=device), dtype)


def rotation_at(op: Rope, each: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [.., channels / 2] of positions [..]. each: the `frequencies`."""
    angles = positions[..., None].double() * each
    return (angles.cos() * op.magnitude).to(dtype), (angles.sin() * op.magnitude).to(dtype)


@lru_cache(maxsize=32)
def frequencies(op: Rope, channels: int, device: torch.device) -> Tensor:
    """Return the angle between neighbouring positions of each pair of channels, float64 [channels / 2]."""
    return torch.tensor(op.frequencies(channels), device=device, dtype=torch.float64)
