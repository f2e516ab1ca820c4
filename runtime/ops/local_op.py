"""One op on one rank: what the functions of `registry.local` and `registry.next_position` are made from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import Tensor

from megaloom.dsl import Dim, Value
from megaloom.dsl.facts.placement import PlacedOp, Transition
from megaloom.planner.contract.capability import CoreKernel

from .dropout_masks import MaskSource

if TYPE_CHECKING:  # megatron-core, which the oracle does without
    from megaloom.runtime.megatron.process_groups import ProcessGroups

TensorFunction = Callable[..., Tensor]
"""From the arguments of an op: its result."""


@frozen(eq=False)
class LocalOp(ABC):
    """One primitive of a body on one rank, with the collectives that the rank can take part in.

    masks: of dropout; None in an evaluation. dropout: the number of this primitive among those with dropout.
    kernel: that of an attention core or a scan.
    """

    placed: PlacedOp
    groups: ProcessGroups
    masks: MaskSource | None = None
    dropout: int = 0
    kernel: CoreKernel | None = None
    overwrites_logits: bool = False  # nothing but this loss reads the logits, and an Unembed hides their padding

    @property
    def out(self) -> Value:
        """Return the result as a value."""
        return self.placed.step.value

    def axis(self, dim: str) -> str | None:
        """Return the axis over which a dim of the result or of an argument is sharded here."""
        return self.placed.step.axes.get(dim)

    def padding(self, d: Dim, x: Tensor, i: int, axis: str) -> Tensor | None:
        """Return a mask of the padding in this rank's shard of dim `i` of a tensor; None if there is none."""
        return padding_of(d, x, i, self.groups.of_axis(axis))

    def fill_padding(self, a: Value, x: Tensor, over: tuple[str, ...], number: float) -> Tensor:
        """Return an argument with a number in what pads its dims `over`."""
        for i, d in enumerate(a.shape):
            axis = self.axis(d.name) if d.name in over and d.size is not None else None
            if axis in ("tp", "etp") and not self.is_whole(d, x.shape[i], axis):
                padding = self.padding(d, x, i, axis)
                x = x if padding is None else x.masked_fill(padding, number)
        return x

    def is_whole(self, d: Dim, count: int, axis: str) -> bool:
        """Return whether a tensor with this many indices of a dim is no shard: it was gathered along the dim."""
        return count > self.placed.step.table.dims[d.name].local(
            d.known, self.groups.of_axis(axis).size(), self.groups.layout.split
        )

    @abstractmethod
    def perform(self, transition: Transition, x: Tensor) -> Tensor:
        """Return a tensor after a transition that moves no dim: a sum over ranks, or the gradient of one."""

    @abstractmethod
    def exchange_over_ep(self, x: Tensor) -> Tensor:
        """Return x with each of the ep equal parts of its first dim exchanged: those that were meant for this rank."""

    @abstractmethod
    def recomputed(self, function: TensorFunction, *args: Tensor) -> Tensor:
        """Return the function's result; the backward pass saves only the arguments and runs it again."""

    @abstractmethod
    def drop_apart(self, x: Tensor, rate: float) -> Tensor:
        """Return x after dropout by random numbers that differ between tp ranks."""

    @abstractmethod
    def overwriting_cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of fp32 logits [.., vocab / tp], which are overwritten."""


def padding_of(d: Dim, x: Tensor, i: int, group: Any) -> Tensor | None:
    """Return a mask of the padding in a rank's shard of dim `i` of a tensor; None if there is none."""
    if x.shape[i] * group.size() == d.known:
        return None
    index = torch.arange(x.shape[i], device=x.device) + group.rank() * x.shape[i]
    return (index >= d.known).view([-1 if k == i else 1 for k in range(x.ndim)])
