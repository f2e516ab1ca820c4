"""The local experts of a mixture: one after the other as in megatron-core, or in grouped matrix products.

`Experts` has the parameter names of megatron-core's SequentialMLP and computes its function. One after the other, the
kernels of each expert wait for the host; a grouped product needs as few kernels as one layer. In `StackedExperts` the
weights of all experts are one parameter for each product.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.transformer import mlp
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.recompute import DiscardedOutput

from . import engine


class ExpertProducts(Protocol):
    """One linear layer of each expert, whose products are computed together."""

    def __call__(self, x: Tensor, ends: Tensor, counts: Tensor) -> Tensor:
        """Return tokens [n, k] times weights [m, k]: the first `counts[0]`, up to ends[0], times the first, and so on.

        Biases are not added.
        """

    def biases(self) -> Tensor | None:
        """Return the biases [experts, m], if there are any."""


class Experts(SequentialMLP):
    """megatron-core's experts. With `recompute`, activations are recomputed in the backward pass."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        for expert in self.local_experts:
            # The dispatcher reduces the partial outputs of experts. On one device they would still ask for a reduction,
            # and megatron-core could not add their biases in place (mlp.py:247).
            expert.linear_fc2.explicit_expert_comm = True
        self.activation = self._grouped_activation()
        self.recompute = False
        self.grouped: tuple[ExpertProducts, ExpertProducts] | None = None  # layers before and after the activation

    def _grouped_activation(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the function between the grouped products. megatron-core has a fused kernel of SwiGLU only."""
        c = self.config
        if not c.gated_linear_unit or c.bias_activation_fusion or not device.gpu_count():
            whole = _activation_only(self.local_experts[0])
            return lambda up, scales: whole.forward(up, scales)[0]
        gate = torch.compile(gated_units)  # for dynamic shapes as soon as the number of tokens changes
        settings = c.activation_func, c.glu_linear_offset, c.activation_func_clamp_value
        return lambda up, scales: gate(up, scales, *settings)

    def use_engine(self, *, adds_gradients: bool) -> None:
        """Let Transformer Engine multiply by the weights of all experts. adds_gradients: to the buffers of DDP."""
        layers = [[e.linear_fc1 for e in self.local_experts], [e.linear_fc2 for e in self.local_experts]]
        first, second = (engine.GroupedLayers(each, adds_gradients=adds_gradients) for each in layers)
        self.grouped = first, second

    def recompute_activations(self) -> None:
        """Recompute the activations of all experts in the backward pass."""
        self.recompute = True
        for expert in self.local_experts:
            expert.forward = partial(_forward_with_recompute, expert, _activation_only(expert, after=expert.linear_fc1))

    def forward(self, x: Tensor, counts: Tensor, scales: Tensor) -> tuple[Tensor, None]:
        """Return the output for tokens [n, embed], sorted by expert, `counts` per expert, times the tokens' scales."""
        if self.grouped is None:
            return super().forward(x, counts, scales)
        first, second = self.grouped
        ends = counts.to(x.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        up = add_biases(first(x, ends, counts), ends, first.biases())
        if not self.recompute or not torch.is_grad_enabled():
            discarded, h = None, self.activation(up, scales)
        else:
            discarded = DiscardedOutput()
            (h,) = discarded.run(lambda up, scales: (self.activation(up, scales),), up, scales)
        y = add_biases(second(h, ends, counts), ends, second.biases(), scales)
        if discarded:
            discarded.free_after(y)
        return y, None


class StackedExperts(Experts):
    """Experts whose weights are one parameter for each product, by which torch multiplies in one kernel."""

    def __init__(self, num_local_experts: int, *args: Any, **rest: Any) -> None:
        super().__init__(1, *args, **rest)
        (expert,) = self.local_experts  # it has the sizes and attributes of each
        del self.local_experts
        self.num_local_experts = num_local_experts
        self.linear_fc1 = StackedLinear(expert.linear_fc1, num_local_experts)
        self.linear_fc2 = StackedLinear(expert.linear_fc2, num_local_experts)
        self.grouped = self.linear_fc1, self.linear_fc2

    def recompute_activations(self) -> None:
        """Recompute the activations of all experts in the backward pass."""
        self.recompute = True


class StackedLinear(nn.Module):
    """One linear layer of each expert. The rows of their weights follow one another: a parameter [experts · m, k]."""

    def __init__(self, layer: nn.Module, count: int) -> None:
        """Allocate the parameters of `count` layers such as this one."""
        super().__init__()
        self.count = count
        self.weight = _repeated(layer.weight, count)
        self.bias = None if layer.bias is None else _repeated(layer.bias, count)

    def forward(self, x: Tensor, ends: Tensor, counts: Tensor) -> Tensor:
        out: Tensor = GroupedProduct.apply(x, ends, self.weight)  # type: ignore[no-untyped-call]
        return out

    def biases(self) -> Tensor | None:
        """Return the biases [experts, m], if there are any."""
        return None if self.bias is None else self.bias.view(self.count, -1)


def _repeated(p: Tensor, count: int) -> nn.Parameter:
    """Return a parameter of `count` times the rows of p, sharded as those are."""
    out = nn.Parameter(p.new_empty(count * len(p), *p.shape[1:]))
    vars(out).update(vars(p))
    if getattr(p, "partition_dim", -1) == 0:
        out.partition_stride = count * getattr(p, "partition_stride", 1)  # type: ignore[attr-defined]
    return out


class GroupedProduct(torch.autograd.Function):
    """Tokens [n, k] times weights [experts · m, k]: tokens up to ends[0] times the first m rows, and so on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, weights)
        return torch._grouped_mm(x, weights.view(len(ends), -1, weights.shape[1]).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, weights = ctx.saved_tensors
        dy = gradients[0].contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch._grouped_mm(dy, weights.view(len(ends), -1, weights.shape[1]), offs=ends)
        if ctx.needs_input_grad[2]:
            dw = torch._grouped_mm(dy.T, x, offs=ends).flatten(0, 1)
        return dx, None, dw


def add_biases(x: Tensor, ends: Tensor, biases: Tensor | None, scales: Tensor | None = None) -> Tensor:
    """Return tokens [n, m], sorted by expert up to `ends`, plus the bias of each token's expert, if there are any.

    biases: [experts, m]. scales: [n], by which a token's bias is multiplied. A product with rows of one 1 adds the
    biases and, in the backward pass, sums their gradients.
    """
    if biases is None:
        return x
    tokens = torch.arange(len(x), device=x.device, dtype=ends.dtype)
    rows = nn.functional.one_hot(torch.searchsorted(ends, tokens, right=True), len(biases)).to(x.dtype)
    rows = rows if scales is None else rows * scales[:, None].to(x.dtype)
    return torch.addmm(x, rows, biases)


def gated_units(
    up: Tensor, scales: Tensor, activation: Callable[[Tensor], Tensor], offset: float, limit: float | None
) -> Tensor:
    """Return activation(gate) · (linear + offset) of up = [gate, linear] [n, 2 m], times the tokens' scales [n].

    limit: the largest gate, and the largest absolute value of the linear half.
    """
    gate, linear = up.chunk(2, -1)
    if limit is not None:
        gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    return (activation(gate) * (linear + offset) * scales[:, None]).to(up.dtype)


class BiasOnly(nn.Module):
    """Stands for a linear layer whose product is already computed: returns its input and the bias of the layer."""

    def __init__(self, layer: nn.Module | None) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # not its parameter, which sharding replaces

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, None if self.layer is None else self.layer.bias


def _activation_only(expert: mlp.MLP, after: nn.Module | None = None) -> mlp.MLP:
    """Return a copy of an expert that computes what is between its two matrix products.

    after: the first layer, if its bias is still to be added.
    """
    activation = copy(expert)
    activation._modules = {"linear_fc1": BiasOnly(after), "linear_fc2": BiasOnly(None)}
    return activation


def _forward_with_recompute(expert: mlp.MLP, activation: mlp.MLP, x: Tensor, scale: Tensor) -> tuple[Tensor, None]:
    """Return the output of one expert; its activation is recomputed in the backward pass."""
    up, _ = expert.linear_fc1(x)
    if not torch.is_grad_enabled():
        discarded, (h, _) = None, activation(up, scale)
    else:
        discarded = DiscardedOutput()
        (h,) = discarded.run(lambda up, scale: activation(up, scale)[:1], up, scale)
    y, bias = expert.linear_fc2(h)
    y = y if bias is None else (y + bias * scale[:, None]).to(y.dtype)  # as in megatron-core 0.16.1, mlp.py:247
    if discarded:
        discarded.free_after(y)
    return y, None
