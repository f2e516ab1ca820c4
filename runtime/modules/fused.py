"""What would be a row of kernels, each of which passes memory, as one. On GPUs they are compiled, for each shape anew.

Protocol: `turned` and `cross_entropy` compute what megatron-core's functions of that purpose do, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaloom.runtime.megatron import device


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that is good for any shape takes two to three times as long as one for the shape at hand."""
    return torch.compile(function, dynamic=False) if device.gpus() else function


def turned(t: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Channels [s, b, heads, head] turned by the angles [s, 1, 1, some of head] of their positions, half by half."""
    assert not interleaved, "neighbours are turned by megatron-core's own function"
    out: Tensor = Turn.apply(t, *_parts(angles, t.dtype))
    return out


@lru_cache(maxsize=32)  # as many as megatron-core keeps angles
def _parts(angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return angles.cos().to(dtype), angles.sin().to(dtype)


class Turn(torch.autograd.Function):
    """See `turned`. A gradient turns back: both halves of a head turn by the same angles."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return compiled(_turned)(t, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return compiled(_turned)(*gradients, *ctx.saved_tensors, -1), None, None


def _turned(t: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    x, rest = t[..., : cos.shape[-1]], t[..., cos.shape[-1] :]
    a, b = x.chunk(2, -1)
    return torch.cat([x * cos + torch.cat([-b, a], -1) * (way * sin), rest], -1)


def cross_entropy(logits: Tensor, labels: Tensor, group: Any) -> Tensor:
    """The loss of each token [s, b], in fp32, of this rank's columns of the logits [s, b, vocab / tp].

    Nothing of their size is kept beside the logits themselves: what the gradient needs is computed again.
    """
    loss: Tensor = CrossEntropy.apply(logits, labels, group)
    return loss


class CrossEntropy(torch.autograd.Function):
    """See `cross_entropy`. The columns are those of a vocabulary that is divided evenly over the group."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Any) -> Tensor:
        most = logits.amax(-1).float()
        dist.all_reduce(most, dist.ReduceOp.MAX, group)
        labels = labels - group.rank() * logits.shape[-1]
        both = compiled(_sums)(logits, labels, most)
        dist.all_reduce(both, group=group)
        total, own = both
        ctx.save_for_backward(logits, labels, most + total.log())
        return total.log() - own

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return compiled(_gradient)(*ctx.saved_tensors, *gradients), None, None


def _sums(logits: Tensor, labels: Tensor, most: Tensor) -> Tensor:
    """Of each token, over these columns: the sum of exponentials, and the label's own logit, less the largest."""
    total = (logits.float() - most[..., None]).exp().sum(-1)
    own = logits.gather(-1, labels.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0].float() - most
    return torch.stack([total, torch.where((labels >= 0) & (labels < logits.shape[-1]), own, 0.0)])


def _gradient(logits: Tensor, labels: Tensor, whole: Tensor, gradient: Tensor) -> Tensor:
    """The probabilities, less 1 at the label, times the gradient of the loss; `whole` is the logarithm of the sum."""
    at = labels[..., None] == torch.arange(logits.shape[-1], device=logits.device)
    return (((logits.float() - whole[..., None]).exp() - at.float()) * gradient[..., None]).to(logits.dtype)
