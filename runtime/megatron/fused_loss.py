"""Fused cross-entropy and log-sum-exp of sharded logits. On GPUs `torch.compile` makes one kernel per shape of each.

`cross_entropy` computes what the function of megatron-core computes, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from . import device

Function = TypeVar("Function", bound=Callable[..., Tensor])


@cache
def compiled(function: Function) -> Function:
    """Return the function compiled for fixed shapes on GPUs: a kernel for dynamic shapes takes 2 to 3 times as long."""
    return torch.compile(function, dynamic=False) if device.gpu_count() else function


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


def log_sum_exp(x: Tensor, group: Any) -> Tensor:
    """Return log(sum(exp(x))) [..] in fp32, from this rank's columns of x [.., vocab / tp]."""
    out: Tensor = LogSumExpFunction.apply(x, group)
    return out


class LogSumExpFunction(torch.autograd.Function):
    """Autograd function of `log_sum_exp`. The columns are sharded evenly over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        largest = x.amax(-1).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        total = compiled(_exp_sum)(x, largest)
        dist.all_reduce(total, group=group)
        out = largest + total.log()
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return compiled(_probabilities)(*ctx.saved_tensors, *gradients), None


def _exp_sum(x: Tensor, largest: Tensor) -> Tensor:
    return (x.float() - largest[..., None]).exp().sum(-1)


def _probabilities(x: Tensor, log_sum: Tensor, gradient: Tensor) -> Tensor:
    """Return the softmax of x times a gradient [..]. `log_sum` is the log of the sum of exponentials."""
    return ((x.float() - log_sum[..., None]).exp() * gradient[..., None]).to(x.dtype)
