"""The experts of a mixture on this device: megatron-core's, one after the other or all in one product.

Protocol: `Experts` has megatron-core's parameters, by its names, and computes what it does. One after the other, each
expert's kernels wait for the host; together they are as few as those of one layer.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any

import torch
from megatron.core.transformer import mlp
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from megaloom.planner.contract.workload import Precision
from megaloom.runtime.megatron.environment import current_capability
from megaloom.runtime.megatron.recompute import Discarded


class Experts(SequentialMLP):
    """megatron-core's experts; `frugal` ones compute their activation again rather than keep it."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        for expert in self.local_experts:
            # The dispatcher adds what they compute in parts. On one device they would still ask for a sum, into which
            # megatron-core then cannot add their biases in place (mlp.py:247).
            expert.linear_fc2.explicit_expert_comm = True
        self.between = _activation(self.local_experts[0]).forward
        self.frugal = False

    def be_frugal(self) -> None:
        """Compute activations again."""
        self.frugal = True
        for expert in self.local_experts:
            expert.forward = partial(_frugal, expert, _activation(expert))

    def forward(self, x: Tensor, counts: Tensor, scales: Tensor) -> tuple[Tensor, None]:
        """What they make of tokens [n, embed] in the order of experts, `counts` of each, times the tokens' scales."""
        if not self.grouped(x):
            return super().forward(x, counts, scales)
        ends = counts.to(x.device).cumsum(0, dtype=torch.int32)
        up = product(x, ends, [e.linear_fc1.weight for e in self.local_experts])
        if not self.frugal or not torch.is_grad_enabled():
            made, (h, _) = None, self.between(up, scales)
        else:
            made = Discarded()
            (h,) = made.run(lambda up, scales: self.between(up, scales)[:1], up, scales)
        y = product(h, ends, [e.linear_fc2.weight for e in self.local_experts])
        if made:
            made.free(y)
        return y, None

    def grouped(self, x: Tensor) -> bool:
        """True if one kernel multiplies by the weights of all experts, as the plan's prediction assumes."""
        first, last = self.local_experts[0].linear_fc1, self.local_experts[0].linear_fc2
        precision = Precision.BF16 if x.dtype is torch.bfloat16 else Precision.FP32
        count, biased = len(self.local_experts), last.bias is not None
        aligned = all(n % 8 == 0 for part in (first, last) for n in part.weight.shape)  # rows of 16 bytes
        can = current_capability()
        return aligned and can.groups_experts(last.weight.numel(), count, biased, precision)


def product(x: Tensor, ends: Tensor, weights: list[Tensor]) -> Tensor:
    """Tokens [n, k] times weights [m, k] of their own: those up to ends[0] times the first one, and so on."""
    out: Tensor = Product.apply(x, ends, *weights)
    return out


class Product(torch.autograd.Function):
    """See `product`. The weights are put side by side anew for the gradient, rather than be kept so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        return torch._grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        dy = gradients[0].contiguous()
        dw = torch._grouped_mm(dy.T, x, offs=ends)
        return torch._grouped_mm(dy, torch.stack(weights), offs=ends), None, *dw.unbind()


class Given(nn.Module):
    """In place of a product before an activation: what it made, and its bias."""

    def __init__(self, bias: Tensor | None) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, self.bias


def _activation(expert: mlp.MLP) -> mlp.MLP:
    """An expert without its products: what it computes between them."""
    between = copy(expert)
    between._modules = {"linear_fc1": Given(expert.linear_fc1.bias), "linear_fc2": Given(None)}
    return between


def _frugal(expert: mlp.MLP, between: mlp.MLP, x: Tensor, scale: Tensor) -> tuple[Tensor, None]:
    """What an expert computes of its tokens; its activation is made again rather than kept."""
    up, _ = expert.linear_fc1(x)
    if not torch.is_grad_enabled():
        made, (h, _) = None, between(up, scale)
    else:
        made = Discarded()
        (h,) = made.run(lambda up, scale: between(up, scale)[:1], up, scale)
    y, bias = expert.linear_fc2(h)
    y = y if bias is None else y + bias * scale[:, None]  # as in megatron-core 0.16.1, mlp.py:247
    if made:
        made.free(y)
    return y, None
