"""Fused RoPE, dropout and cross-entropy. On GPUs `torch.compile` turns each into one kernel per shape.

`apply_rope` and `cross_entropy` compute what the functions of megatron-core compute, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megaloom.runtime.megatron import device
from megaloom.runtime.reference.dropout import dropout_mask, next_hash

Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def compiled(function: Function) -> Function:
    """Return the function compiled for fixed shapes on GPUs: a kernel for dynamic shapes takes 2 to 3 times as long."""
    return torch.compile(function, dynamic=False) if device.gpu_count() else function


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
    """Return the hashes [seq, batch, 1] of the vectors of hidden states, as `MaskSource.rows` does.

    positions: [seq, 1, 1]. A key and a first sample without dims are tensors, so that one kernel serves all steps.
    """
    return compiled(_hidden_rows)(key, first_sample, batch, positions)


def _hidden_rows(key: Tensor, first_sample: Tensor, batch: int, positions: Tensor) -> Tensor:
    samples = first_sample + torch.arange(batch, device=key.device)
    return next_hash(next_hash(key, samples[:, None]), positions)


def drop(x: Tensor, rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Return x [.., columns] after dropout, with the mask of `reference.dropout.dropout_mask`."""
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


def cross_entropy(logits: Tensor, labels: Tensor, group: Any) -> Tensor:
    """Return the loss of each token [s, b] in fp32, from this rank's columns of the logits [s, b, vocab / tp].

    Only the logits are saved for the backward pass; it recomputes the probabilities.
    """
    loss: Tensor = CrossEntropy.apply(logits, labels, group)
    return loss


class CrossEntropy(torch.autograd.Function):
    """Autograd function of `cross_entropy`. The vocabulary is sharded evenly over the group."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Any) -> Tensor:
        largest = logits.amax(-1).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        labels = labels - group.rank() * logits.shape[-1]
        sums = compiled(_sums)(logits, labels, largest)
        dist.all_reduce(sums, group=group)
        exp_sum, label_logit = sums
        ctx.save_for_backward(logits, labels, largest + exp_sum.log())
        return exp_sum.log() - label_logit

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return compiled(_gradient)(*ctx.saved_tensors, *gradients), None, None


def _sums(logits: Tensor, labels: Tensor, largest: Tensor) -> Tensor:
    """Return for each token the sum of exponentials and the label's logit, both relative to the largest logit.

    The label's logit is 0 if the label is not among these columns.
    """
    exp_sum = (logits.float() - largest[..., None]).exp().sum(-1)
    label_logit = logits.gather(-1, labels.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0].float() - largest
    return torch.stack([exp_sum, torch.where((labels >= 0) & (labels < logits.shape[-1]), label_logit, 0.0)])


def _gradient(logits: Tensor, labels: Tensor, log_sum: Tensor, gradient: Tensor) -> Tensor:
    """Return (probabilities − one-hot labels) · gradient. `log_sum` is the log of the sum of exponentials."""
    one_hot = labels[..., None] == torch.arange(logits.shape[-1], device=logits.device)
    return (((logits.float() - log_sum[..., None]).exp() - one_hot.float()) * gradient[..., None]).to(logits.dtype)
