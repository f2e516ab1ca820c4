"""The update of the weights at the end of a step: loss and gradients are checked before the optimizer moves anything.

`update_weights` clips the gradients and steps the optimizer, unless a value is NaN or infinite on any rank. With fp16,
`SharedGradScaler` then lowers the loss scale. `first_bad_gradient` and `first_bad_output` say where such a value came
from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from attrs import frozen
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from torch import Tensor, nn

from megaloom.dsl.errors import UserError
from megaloom.runtime.launch.agreement import any_rank
from megaloom.runtime.megatron.optimizer_state import optimizers_of
from megaloom.runtime.megatron.weight_shards import own_values
from megaloom.runtime.modules.model_chunk import ModelChunk

from .recipe import Recipe


class NonFiniteError(UserError):
    """A loss or gradient that is NaN or infinite, in a step that may not be skipped. No weight has changed."""


@frozen(order=True)
class NonFiniteValue:
    """The origin of a NaN or an infinity. The first one in the order of computation is the smallest."""

    order: int
    rank: int
    text: str

    def __str__(self) -> str:
        return f"{self.text} on rank {self.rank}"


class SharedGradScaler(DynamicGradScaler):
    """megatron-core's dynamic loss scale, shared by the optimizers of dense and of expert weights.

    megatron-core gives each its own scaler, although the loss has one scale. So the optimizers do not update this one;
    `settle` does, once per step.

    The recipe scales the mean loss, as megatron-core's users do. The runtime scales the sum over the tokens of a global
    batch, and divides the gradients later; so the scale here is the recipe's divided by a power of two near `tokens`.
    """

    def __init__(self, recipe: Recipe, tokens: int) -> None:
        self.unit = 2.0 ** round(math.log2(tokens))
        super().__init__(
            initial_scale=recipe.initial_loss_scale / self.unit,
            min_scale=recipe.min_loss_scale / self.unit,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=recipe.loss_scale_window,
            hysteresis=1,
        )

    @property
    def loss_scale(self) -> float:
        """Return the scale of the mean loss."""
        return float(self._scale) * self.unit

    def update(self, found_inf: bool) -> None:
        """Do nothing: an optimizer sees only its own gradients."""

    def settle(self, overflow: bool) -> None:
        """Lower the scale after an overflow; raise it after enough steps without one."""
        super().update(overflow)

    @property
    def is_smallest(self) -> bool:
        """Return whether the scale cannot be lowered."""
        return bool(self._scale <= self.min_scale)


@frozen
class Update:
    """The result of `update_weights`."""

    grad_norm: float  # before clipping
    done: bool  # False if the loss or a gradient is not finite: then no weight has changed


@torch.no_grad()
def update_weights(optimizer: MegatronOptimizer, loss: float, clip_grad: float) -> Update:
    """Clip the gradients and step the optimizer, if loss and gradients are finite on all ranks. Every rank calls it.

    clip_grad: the largest norm of the gradients; 0 clips none.
    """
    overflow = bool(optimizer.prepare_grads())
    norm = float(optimizer.get_grad_norm())
    if not _all_ranks(math.isfinite(loss) and math.isfinite(norm) and not overflow):
        return Update(norm, False)
    for one in optimizers_of(optimizer) if clip_grad else ():
        if not one.is_stub_optimizer and (parameters := one.get_parameters()):
            clip_grad_by_total_norm_fp32(parameters, max_norm=clip_grad, total_norm=norm)
    optimizer.step_with_ready_grads()
    return Update(norm, True)


def _all_ranks(condition: bool) -> bool:
    """Return whether a condition holds on all ranks. Every rank calls it."""
    return not any_rank(not condition)


def first_bad_gradient(chunks: Iterable[ModelChunk]) -> NonFiniteValue | None:
    """Return the weight or gradient that first became NaN or infinite, or None. Every rank calls it.

    The backward pass runs from the last node to the first, and such a value spreads on its way. A weight that is itself
    not finite comes before all gradients.
    """
    return _first_of_all_ranks(_bad_gradients(chunks))


def _bad_gradients(chunks: Iterable[ModelChunk]) -> Iterator[NonFiniteValue]:
    rank = dist.get_rank()
    for chunk in chunks:
        nodes = len(chunk.graph.nodes)
        for node, module in chunk.node_modules():
            order = chunk.graph.index[node.name]
            for name, p in module.named_parameters():
                if not _is_finite(own_values(p)):
                    yield NonFiniteValue(order, rank, f"{node.name}: the parameter {name} is not finite")
                elif (gradient := getattr(p, "main_grad", None)) is not None and not _is_finite(gradient):
                    yield NonFiniteValue(2 * nodes - order, rank, f"{node.name}: the gradient of {name} is not finite")


def first_bad_output(chunks: Iterable[ModelChunk], forward: Callable[[], object]) -> NonFiniteValue | None:
    """Run a forward pass, and return the first node whose output is NaN or infinite, or None. Every rank calls it."""
    bad: list[NonFiniteValue] = []
    with _output_hooks(chunks, bad.append), torch.no_grad():
        forward()
    return _first_of_all_ranks(bad)


@contextmanager
def _output_hooks(chunks: Iterable[ModelChunk], report: Callable[[NonFiniteValue], None]) -> Iterator[None]:
    """Report each node whose output is not finite, in forward passes inside the context."""

    def check(order: int, name: str, module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and not _is_finite(output):
            parameter = next((k for k, p in module.named_parameters() if not _is_finite(own_values(p))), None)
            reason = "its output is not finite" if parameter is None else f"the parameter {parameter} is not finite"
            report(NonFiniteValue(2 * order + (parameter is None), dist.get_rank(), f"{name}: {reason}"))

    hooks = [
        module.register_forward_hook(partial(check, chunk.graph.index[node.name], node.name))
        for chunk in chunks
        for node, module in chunk.node_modules()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _first_of_all_ranks(own: Iterable[NonFiniteValue]) -> NonFiniteValue | None:
    """Return the first of the values of all ranks. Every rank calls it."""
    firsts: list[NonFiniteValue | None] = [None] * dist.get_world_size()
    dist.all_gather_object(firsts, min(own, default=None))
    return min((value for value in firsts if value is not None), default=None)


def _is_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x.detach()).all())
