"""The steps of a run that users may replace, by the names of NeMo's MegatronParallel.

Write a class with any of these methods and pass an instance as `steps`: data_step makes the named tensors of a sample,
training_step runs the model on a micro-batch and returns (loss_sum, weight_sum). validation_step does so without
gradients on held-out data during training, test_step after it. Training minimises sum of loss_sum / sum of weight_sum
over the global batch, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from attrs import frozen
from torch import Tensor

from megaloom.dsl import Graph, LossSums, Node, StackLosses
from megaloom.dsl.node import primitives
from megaloom.dsl.sharding_table import SEQUENCES
from megaloom.runtime.samples.samples import Sample, SampleMaker

MicroBatch = dict[str, Tensor]  # the named tensors of a micro-batch, [batch ..]; sequences are this cp rank's part
Sums = tuple[Tensor, Tensor]  # loss_sum, weight_sum


@frozen
class Outputs:
    """The values that the last pipeline stage returns for a micro-batch.

    values: by node, the losses and what they read. Hidden states and logits are [seq, batch, ..] and this rank's part,
    logits without the columns that pad the vocabulary.
    """

    values: dict[str, Tensor]
    loss_sum: Tensor  # of the declared losses, with their coefficients
    weight_sum: Tensor


Forward = Callable[[MicroBatch], Outputs | None]  # None on all stages but the last


HeldOut = Literal["validation", "test"]


class Steps:
    """The steps of the declared objective. Subclasses, and classes with some of these methods, replace them."""

    def data_step(self, maker: SampleMaker, text: Tensor, i: int, seed: int) -> Sample:
        """Return the named tensors of sample i, without a batch dim. text: tokens [maker.length]."""
        return maker.make(text, i, seed)

    def training_step(self, forward: Forward, batch: MicroBatch) -> Sums | None:
        """Return (loss_sum, weight_sum) of a micro-batch on the last stage, None on the others. Call forward once."""
        outputs = forward(batch)
        return None if outputs is None else (outputs.loss_sum, outputs.weight_sum)

    def validation_step(self, forward: Forward, batch: MicroBatch) -> Sums | None:
        """Return (loss_sum, weight_sum) of a micro-batch of held-out data during training."""
        return self.training_step(forward, batch)

    def test_step(self, forward: Forward, batch: MicroBatch) -> Sums | None:
        """Return (loss_sum, weight_sum) of a micro-batch of held-out data after training."""
        return self.validation_step(forward, batch)


def complete(steps: Any) -> Steps:
    """Return steps with the default for each method that a plain class lacks."""
    if isinstance(steps, Steps):
        return steps
    if steps is None:
        return Steps()
    names = [name for name in vars(Steps) if not name.startswith("_") and hasattr(steps, name)]
    out = Steps()
    for name in names:
        setattr(out, name, getattr(steps, name))
    return out


def held_out_step(steps: Steps, step: HeldOut) -> Callable[[Forward, MicroBatch], Sums | None]:
    """Return the step for held-out data: `validation_step` or `test_step`."""
    return steps.test_step if step == "test" else steps.validation_step


@frozen
class Losses:
    """The losses of a model: the node at its end, and the name and coefficient of each loss."""

    end: str
    names: tuple[str, ...]
    coefficients: tuple[float, ...]
    copies: tuple[int, ...]  # context-parallel ranks that each compute the same sums, such as of one class per image

    @classmethod
    def of(cls, graph: Graph, cp: int) -> Losses:
        """Return the losses of a graph that ends in one. cp: context-parallel ranks."""
        node = graph.nodes[graph.index[graph.outputs[0]]]
        op = node.value.source.op
        names = node.inputs if isinstance(op, StackLosses) else (node.name,)
        copies = tuple(1 if _is_of_positions(graph.nodes[graph.index[name]]) else cp for name in names)
        return cls(node.name, names, op.coefficients if isinstance(op, StackLosses) else (1.0,), copies)

    def sums(self, end: Tensor, ratios: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss_sum, weight_sum, and a report [losses + 1, 2]: the total, then each loss.

        end: of the node at the end, [2] or [losses, 2]. ratios: for each loss, the weights of the first loss over its
        own, in the global batch: so the quotient of the sums is the sum of coefficient * mean.
        """
        each = self._counted_once(end.reshape(-1, 2))
        coefficients = torch.tensor(self.coefficients, dtype=each.dtype, device=each.device) * ratios.to(each)
        total, weight = (each[:, 0] * coefficients).sum(), each[0, 1].detach()
        return total, weight, each.detach()

    def _counted_once(self, each: Tensor) -> Tensor:
        """Return sums [losses, 2] that add up over the context-parallel ranks, with the gradients that they have.

        The gradient of a value that these ranks replicate is whole on each of them, so it is not divided.
        """
        if max(self.copies) == 1:
            return each
        copies = torch.tensor(self.copies, dtype=each.dtype, device=each.device)[:, None]
        return each.detach() / copies + (each - each.detach())


def _is_of_positions(loss: Node) -> bool:
    """Return whether a loss adds up over the positions of sequences, which context-parallel ranks share."""
    ends = [v for v, *_ in primitives(loss.value) if isinstance(v.op, LossSums)]
    return any(d.name in SEQUENCES for v in ends for d in v.args[0].shape)
