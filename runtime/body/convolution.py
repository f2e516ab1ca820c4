"""Causal depthwise convolution of a body, as one product for each entry of its kernel.

torch's own convolution wants positions last, so that it would copy what projections leave with channels last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaloom.dsl import Conv, Value
from megaloom.runtime.reference.tensors import broadcast


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
        y, count = x * taps[-1], x.shape[1]
        for i in range(1, min(len(taps), count)):
            y[:, i:].addcmul_(x[:, : count - i], taps[-1 - i])
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, taps = ctx.saved_tensors
        of_x, of_taps, count = gradient * taps[-1], torch.zeros_like(taps), x.shape[1]
        for i in range(min(len(taps), count)):
            if i:
                of_x[:, : count - i].addcmul_(gradient[:, i:], taps[-1 - i])
            of_taps[-1 - i] = (gradient[:, i:] * x[:, : count - i]).sum((0, 1))
        return of_x, of_taps
