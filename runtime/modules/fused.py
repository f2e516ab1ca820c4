"""Fused RoPE and dropout. On GPUs `torch.compile` turns each into one kernel per shape.

`apply_rope` computes what the function of megatron-core computes, on any device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megaloom.runtime.megatron.fused_loss import compiled
from megaloom.runtime.ops.dropout_masks import dropout_mask, next_hash


def apply_rope(t: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate channels [s, b, heads, head_dim] by the angles [s, 1, 1, rotated channels] of their positions.

    Channel i forms a pair with channel i + half. For interleaved pairs use megatron-core's function.
    """
    assert not interleaved, "megatron-core's own function rotates interleaved pairs"
    out: Tensor = RotateHalves.apply(t, *_cos_and_sin(angles, t.dtype))
    return out


@lru_cache(maxsize=32)  # megatron-core caches as many angles
def _cos_and_sin(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return angles.cos().to(dtype), angles.sin().to(dtype)


def hidden_rows(key: Tensor, first_sample: Tensor, batch: int, positions: Tensor) -> Tensor:
    """Return the hashes [seq, batch, 1] of the vectors of hidden states, as `MaskSource.drop` does.

    positions: [seq, 1, 1]. A key and a first sample without dims are tensors, so that one kernel serves all steps.
    """
    return compiled(_hidden_rows)(key, first_sample, batch, positions)


def _hidden_rows(key: Tensor, first_sample: Tensor, batch: int, positions: Tensor) -> Tensor:
    samples = first_sample + torch.arange(batch, device=key.device)
    return next_hash(next_hash(key, samples[:, None]), positions)


def drop(x: Tensor, rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Return x [.., columns] after dropout, with the mask of `ops.dropout_masks.dropout_mask`."""
    out: Tensor = DropElements.apply(x, rows, columns, rate)
    return out


class DropElements(torch.autograd.Function):
    """Autograd function of `drop`. It saves the mask, one byte for each element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, columns: Tensor, rate: float) -> Tensor:
        y, mask = compiled(_dropped)(x, rows, columns, rate)
        ctx.save_for_backward(mask)
        ctx.rate = rate
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return compiled(_masked)(*gradients, *ctx.saved_tensors, ctx.rate), None, None, None


def _dropped(x: Tensor, rows: Tensor, columns: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    mask = dropout_mask(rows, columns, rate)
    return _masked(x, mask, rate), mask


def _masked(x: Tensor, mask: Tensor, rate: float) -> Tensor:
    return x * mask * (1 / (1 - rate))


class RotateHalves(torch.autograd.Function):
    """Autograd function of `apply_rope`. The gradient is rotated by the negative angles."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return compiled(_rotate)(t, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return compiled(_rotate)(*gradients, *ctx.saved_tensors, -1), None, None


def _rotate(t: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    x, rest = t[..., : cos.shape[-1]], t[..., cos.shape[-1] :]
    a, b = x.chunk(2, -1)
    return torch.cat([x * cos + torch.cat([-b, a], -1) * (sign * sin), rest], -1)
