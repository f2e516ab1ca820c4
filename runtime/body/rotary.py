"""Rotary positions in one kernel forward and one backward, as `torch.compile` makes them on GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaloom.dsl import Rope, Shape
from megaloom.runtime.megatron.fused_loss import compiled
from megaloom.runtime.reference.rotary import rotated, rotation
from megaloom.runtime.reference.tensors import dim_index


def rotate_by_kernel(op: Rope, shape: Shape, x: Tensor) -> Tensor:
    """Return x with its pairs of channels rotated by position, equal to `reference.rotary.rotate`, in one kernel."""
    out: Tensor = _Rotate.apply(x, *rotation(op, shape, x), dim_index(shape, "head_dim"), op.interleaved)
    return out


class _Rotate(torch.autograd.Function):
    """Autograd function of `rotate_by_kernel`. The gradient is rotated by the negative angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, dim: int, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.pairs = dim, interleaved
        return compiled(rotated)(x, cos, sin, *ctx.pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return compiled(rotated)(*gradients, cos, -sin, *ctx.pairs), None, None, None, None
