"""The steps of a run that users may replace, by the names of NeMo's MegatronParallel.

Write a class with any of these methods and pass an instance as `steps`: data_step makes the named tensors of a sample,
training_step runs the model on a micro-batch and returns (loss_sum, weight_sum), or with a report (loss_sum,
weight_sum, {name: (sum, weight)}). validation_step does so without gradients on held-out data during training,
test_step after it. Training minimises sum of loss_sum / sum of weight_sum over the global batch, whatever the layout;
so is each name of a report divided. A step sees whole sequences, and returns equal sums on all tp and cp ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import Tensor

from megaloom.runtime.samples.samples import Sample, SampleMaker

if TYPE_CHECKING:
    from .outputs import Outputs  # it imports megatron-core, which only ranks need

MicroBatch = dict[str, Tensor]  # the named tensors of a micro-batch, [batch ..], whole sequences
Report = Mapping[str, tuple[Tensor, Tensor]]  # sum and weight by name
Sums = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Report]  # loss_sum, weight_sum


Forward: TypeAlias = "Callable[[MicroBatch], Outputs | None]"  # None on all stages but the last
Step = Callable[[Forward, MicroBatch], Sums | None]

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


DECLARED = Steps()


def complete(steps: Any) -> Steps:
    """Return steps with the default for each method that a plain class lacks."""
    if isinstance(steps, Steps):
        return steps
    if steps is None:
        return DECLARED
    names = [name for name in vars(Steps) if not name.startswith("_") and hasattr(steps, name)]
    out = Steps()
    for name in names:
        setattr(out, name, getattr(steps, name))
    return out


def reads_more(steps: Steps) -> bool:
    """Return whether a forward step is the user's own, which may read tensors beside the inputs of the model."""
    names = ("training_step", "validation_step", "test_step")
    return any(getattr(getattr(steps, name), "__func__", None) is not vars(Steps)[name] for name in names)


def held_out_step(steps: Steps, step: HeldOut) -> Step:
    """Return the step for held-out data: `validation_step` or `test_step`."""
    return steps.test_step if step == "test" else steps.validation_step
