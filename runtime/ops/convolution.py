"""Causal depthwise convolution of a body: a sum of products with shifted positions, one for each entry of its kernel.

On GPUs `torch.compile` makes it one kernel. torch's own convolution wants positions last, so that it would copy what
projections leave with channels last.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaloom.dsl import Conv, Value
from megaloom.runtime.megatron.fused_loss import compiled

from .tensors import broadcast


def convolve(out: Value, x: Tensor, kernel: Tensor) -> Tensor:
    """Return the convolution of x with the kernel: a tensor with the dims of `out`."""
    assert isinstance(out.op, Conv)
    channels = [d.name for d in out.shape.without("batch", out.op.along)]
    order = ["batch", out.op.along, *channels]
    taps = broadcast(kernel, out.args[1].shape, ["width", *channels]).contiguous()
    y: Tensor = _Convolution.apply(broadcast(x, out.args[0].shape, order), taps)  # type: ignore[no-untyped-call]
    return broadcast(y, order, out.shape)


class _Convolution(torch.autograd.Function):
    """Convolution of x [batch, seq, ..] with taps [width, ..], of which the last is that of the position itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(x, taps)
        return compiled(_result)(x, taps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return compiled(_gradients)(*ctx.saved_tensors, gradient)


def _result(x: Tensor, taps: Tensor) -> Tensor:
    y = x * taps[-1]
    for i in range(1, min(len(taps), x.shape[1])):
        y = y + _delayed(x, i) * taps[-1 - i]
    return y


def _gradients(x: Tensor, taps: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the taps."""
    of_x, of_taps = gradient * taps[-1], [(gradient * x).sum((0, 1))]
    for i in range(1, min(len(taps), x.shape[1])):
        of_x = of_x + _delayed(gradient, -i) * taps[-1 - i]
        of_taps.append((gradient * _delayed(x, i)).sum((0, 1)))
    unread = [torch.zeros_like(of_taps[0])] * (len(taps) - len(of_taps))  # the sequence is shorter than the kernel
    return of_x, torch.stack([*unread, *of_taps[::-1]])


def _delayed(x: Tensor, positions: int) -> Tensor:
    """Return x [batch, seq, ..], with zeros before it, moved to later positions; to earlier ones if negative."""
    return F.pad(x, (*(0, 0) * (x.ndim - 2), positions, -positions))
