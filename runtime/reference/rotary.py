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
    seq = sequence_dim(shape).name
    rotation = _rotation(op, op.rotated_channels(shape), x.shape[dim_index(shape, seq)], x.dtype, x.device)
    return _rotated(op, shape, x, *(broadcast(t, [seq, "head_dim"], shape) for t in rotation))


def rotate_at(op: Rope, shape: Shape, x: Tensor, positions: Tensor) -> Tensor:
    """Return x rotated where each row has positions of its own, [batch, seq]."""
    rotation = _rotation_at(op, op.rotated_channels(shape), positions, x.dtype)
    dims = ["batch", sequence_dim(shape).name, "head_dim"]
    return _rotated(op, shape, x, *(broadcast(t, dims, shape) for t in rotation))


def _rotated(op: Rope, shape: Shape, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    n, last = op.rotated_channels(shape), dim_index(shape, "head_dim")
    rotated, rest = x.split([n, x.shape[last] - n], last)
    pair_dim = last + 1 if op.interleaved else last  # index of the dim that holds the two channels of a pair
    a, b = rotated.unflatten(last, (-1, 2) if op.interleaved else (2, -1)).unbind(pair_dim)
    pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), pair_dim)
    return torch.cat((pairs.flatten(last, last + 1), rest), last)


@lru_cache(maxsize=32)
def _rotation(op: Rope, channels: int, count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, channels / 2], which all layers share."""
    return _rotation_at(op, channels, torch.arange(count, device=device), dtype)


def _rotation_at(op: Rope, channels: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [.., channels / 2] of positions [..]."""
    angles = positions[..., None].double() * _frequencies(op, channels, positions.device)
    cos, sin = ((t * op.magnitude).to(dtype) for t in (angles.cos(), angles.sin()))
    return cos, sin


@lru_cache(maxsize=32)
def _frequencies(op: Rope, channels: int, device: torch.device) -> Tensor:
    """Return the angle between neighbouring positions of each pair of channels, float64 [channels / 2]."""
    return torch.tensor(op.frequencies(channels), device=device, dtype=torch.float64)
