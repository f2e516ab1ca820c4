"""The training recipe: optimizer, learning rate and number of steps. Independent of the layout; free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

from attrs import asdict, evolve, field, frozen

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.choices import Overlap
from megaloom.planner.contract.layout import Layout
from megaloom.runtime.options.option import option, within
from megaloom.runtime.options.units import IN_ELEMENTS, IN_SEQUENCES, IN_STEPS


class Schedule(StrEnum):
    """Schedule of the learning rate after warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    INVERSE_SQUARE_ROOT = "inverse-square-root"
    WSD = "wsd"  # warm-up, stable, decay

    @property
    def has_end(self) -> bool:
        """Return whether the shape of the schedule depends on its last step."""
        return self not in (Schedule.CONSTANT, Schedule.INVERSE_SQUARE_ROOT)


class FinalDecay(StrEnum):
    """Shape of the decay at the end of a WSD schedule."""

    LINEAR = "linear"
    COSINE = "cosine"
    EXPONENTIAL = "exponential"
    MINUS_SQRT = "minus-sqrt"


DEFAULT_LR = 3e-3
"""Peak learning rate of a run from random weights."""
DEFAULT_BIAS_UPDATE_RATE = 1e-3
"""Step of the correction biases of routers (DeepSeek-V3, arXiv:2412.19437, section 4.2)."""
LOWEST = 0.1
"""The default of --min-lr, as a share of --lr (Touvron et al., arXiv:2307.09288, section 2.2)."""

STAYING = ("lr", "router_bias_update_rate")
"""Fields that a continued run keeps, unless others are given."""


@frozen(kw_only=True)
class Recipe:
    """AdamW, and a learning rate that warms up linearly and then follows a schedule."""

    steps: Annotated[int, IN_STEPS] = option(300, check=within(1, 1e9), noted=False)
    """Total number of optimizer steps, including those before a resume."""
    lr: float | None = option(None, check=within(1e-12, 1e3))
    """Peak learning rate. [default: 3e-3; with --from, 5e-5 to 1e-5 by the model's size, of adapters 2e-4 or 1e-4]"""
    min_lr: float | None = option(None, check=within(0, 1e3))
    """Learning rate at the end of the schedule and after it. [default: a tenth of --lr]"""
    warmup: Annotated[int, IN_STEPS] = option(20, check=within(0, 1e9))
    """Warm-up steps."""
    schedule: Schedule = field(default=Schedule.COSINE, converter=Schedule)
    """Learning rate after warm-up. wsd: constant, then a final decay."""
    decay_steps: Annotated[int | None, IN_STEPS] = option(None, check=within(1, 1e9))
    """Step at which the schedule ends. [default: --steps; in a continued run, the end that its schedule has]"""
    final_decay: FinalDecay = field(default=FinalDecay.LINEAR, converter=FinalDecay)
    """Shape of the final decay of wsd."""
    final_decay_steps: Annotated[int | None, IN_STEPS] = option(None, check=within(1, 1e9))
    """Steps of the final decay of wsd. [default: a tenth of the schedule]"""
    rampup_batch: Annotated[int | None, IN_SEQUENCES] = option(None, check=within(1, 1e9))
    """Global batch of the first steps, if it is to grow to --batch. [default: --batch from the start]"""
    rampup_increment: Annotated[int | None, IN_SEQUENCES] = option(None, check=within(1, 1e9))
    """Sequences by which the batch grows at a time. [default: --rampup-batch]"""
    rampup_samples: Annotated[int | None, IN_SEQUENCES] = option(None, check=within(1, 1e15))
    """Sequences after which the batch has its full size."""
    weight_decay: float = option(0.1, check=within(0, 1e3))
    """Weight decay of all parameters except norms and biases."""
    clip_grad: float = option(1.0, check=within(0, 1e12))
    """Largest gradient norm: larger gradients are scaled down to it. 0: they are not clipped."""
    ddp_bucket_size: Annotated[int | None, IN_ELEMENTS] = option(None, check=within(1, 1e15))
    """Gradients that are reduced at a time during the backward pass. [default: 40 million, at least 1 million x dp]"""
    beta1: float = option(0.9, check=within(0, 0.999999))
    """Decay of the first moment."""
    beta2: float = option(0.95, check=within(0, 0.999999))
    """Decay of the second moment."""
    eps: float = option(1e-8, check=within(0, 1))
    """Added to the square root of the second moment."""
    skip_non_finite: Annotated[int, IN_STEPS] = option(0, check=within(0, 1e9))
    """Number of steps with a NaN or infinite loss or gradient to skip; one more ends the run."""
    initial_loss_scale: float = option(2.0**16, check=within(2.0**-24, 2.0**64))
    """fp16: scale of the mean loss in the first step."""
    min_loss_scale: float = option(1.0, check=within(2.0**-24, 2.0**64))
    """fp16: the run ends with an error if gradients overflow at this loss scale."""
    loss_scale_window: Annotated[int, IN_STEPS] = option(1000, check=within(1, 1e9))
    """fp16: steps without an overflow after which the loss scale is doubled."""
    router_bias_update_rate: float | None = option(None, check=within(0, 1))
    """Step by which training moves the biases that correct routers (DeepSeek-V3). [default: 0.001; with --from, 0]"""
    deterministic: bool = False
    """Use deterministic kernels only: a run that is stopped and continued on one layout is bitwise equal."""
    seed: int = option(1234, check=within(0, 2**31))
    """Seed of initial weights, data order and dropout."""

    def __attrs_post_init__(self) -> None:
        """Raise UserError if fields contradict each other."""
        if self.min_lr is not None and self.schedule is Schedule.CONSTANT:
            raise UserError(f"--min-lr {self.min_lr:g} has no effect with --schedule constant\nomit it")
        if self.min_lr is not None and self.min_lr > self.peak_lr:
            raise UserError(
                f"--min-lr {self.min_lr:g} is above --lr {self.peak_lr:g}\n"
                f"give a --min-lr of at most {self.peak_lr:g}, or omit it: it is then {LOWEST * self.peak_lr:g}"
            )
        if self.min_loss_scale > self.initial_loss_scale:
            raise UserError(
                f"--min-loss-scale {self.min_loss_scale:g} is above --initial-loss-scale {self.initial_loss_scale:g}\n"
                "give a smaller --min-loss-scale"
            )
        if (self.rampup_batch is None) != (self.rampup_samples is None):
            raise UserError("--rampup-batch and --rampup-samples belong together\ngive both, or neither")
        end, final = self.schedule_end, self.final_decay_steps
        if self.schedule is Schedule.WSD and final is not None and end is not None and final > end:
            raise UserError(
                f"--final-decay-steps {final} is longer than the schedule, which ends at step {end}\n"
                "give fewer steps, or a larger --decay-steps"
            )

    def batch_at(self, samples: int, batch: int) -> int:
        """Return the sequences of the step that begins after `samples` sequences; `batch` when the batch has grown.

        The batch grows by equal increments, each after as many sequences. Source: megatron-core 0.16.1,
        num_microbatches_calculator.py, RampupBatchsizeNumMicroBatchesCalculator. Raise UserError for a growth that does
        not end at `batch`.
        """
        if self.rampup_batch is None or self.rampup_samples is None:
            return batch
        first, increment = self.rampup_batch, self.rampup_increment or self.rampup_batch
        if first > batch or (batch - first) % increment:
            raise UserError(
                f"--rampup-batch {first} does not grow to a batch of {batch} in steps of {increment}\n"
                f"give a --rampup-batch of at most {batch} and a --rampup-increment that divides the difference"
            )
        increments = (batch - first) // increment
        if samples >= self.rampup_samples or not increments:
            return batch
        return first + samples * increments // self.rampup_samples * increment

    def check_layout(self, layout: Layout) -> None:
        """Raise UserError for an option that has no effect under a layout."""
        overlaps = layout.dp * layout.cp > 1 and layout.has_overlap(Overlap.GRADIENTS)
        if self.ddp_bucket_size is not None and not overlaps:
            raise UserError(
                f"--ddp-bucket-size {self.ddp_bucket_size} has no effect: under this layout gradients are not reduced "
                "during the backward pass\nomit it, or give --overlap gradients and a dp above 1"
            )

    @property
    def peak_lr(self) -> float:
        """Return the learning rate after warm-up."""
        return DEFAULT_LR if self.lr is None else self.lr

    @property
    def lowest_lr(self) -> float:
        """Return the learning rate at the end of the schedule: of a constant one, the peak."""
        if self.schedule is Schedule.CONSTANT:
            return self.peak_lr
        return LOWEST * self.peak_lr if self.min_lr is None else self.min_lr

    @property
    def bias_update_rate(self) -> float:
        """Return the step by which training moves the correction biases of routers."""
        return DEFAULT_BIAS_UPDATE_RATE if self.router_bias_update_rate is None else self.router_bias_update_rate

    @property
    def schedule_end(self) -> int | None:
        """Return the step after which the learning rate is `min_lr`, or None if there is none."""
        return self.steps if self.decay_steps is None and self.schedule.has_end else self.decay_steps

    def continuing(self, saved: Mapping[str, object]) -> Recipe:
        """Return the recipe for a run that continues one with the recipe `saved`, as `as_saved` gives it.

        The schedule ends where it ended, unless `decay_steps` says otherwise: more steps do not stretch it. The peak
        and the lowest learning rate stay, unless others are given.
        """
        end = saved.get("decay_steps", saved.get("steps"))  # checkpoints of earlier versions have steps only
        one_schedule = saved.get("schedule", Schedule.COSINE) == self.schedule and self.schedule.has_end
        kept: Any = {n: saved[n] for n in STAYING if getattr(self, n) is None and saved.get(n) is not None}
        new = evolve(self, **kept)
        lowest = saved.get("min_lr")
        keeps = self.min_lr is None and new.schedule is not Schedule.CONSTANT and new.peak_lr == saved.get("lr")
        if keeps and isinstance(lowest, float | int):
            new = evolve(new, min_lr=min(lowest, new.peak_lr))  # earlier versions had min_lr above lr
        if self.decay_steps is not None or not one_schedule or not isinstance(end, int):
            return new
        return evolve(new, decay_steps=end)

    def as_saved(self) -> dict[str, float | str | bool]:
        """Return the fields that have values, as a checkpoint stores them."""
        lowest = None if self.schedule is Schedule.CONSTANT else self.lowest_lr
        values = asdict(evolve(self, decay_steps=self.schedule_end, lr=self.peak_lr, min_lr=lowest))
        return {name: value for name, value in values.items() if value is not None}
