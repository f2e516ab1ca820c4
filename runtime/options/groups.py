"""The groups of options for data, start, saving and evaluation of a run. Free of torch.

The others are beside what they describe: `Monitoring`, `Recipe` and `EndOfDocument`.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.workload import Backend

from .option import at_least, option, positive
from .units import IN_BATCHES, IN_CHECKPOINTS, IN_EPOCHS, IN_MINUTES, IN_SEQUENCES, IN_STEPS

STDLIB = "stdlib"
"""The word of --data for the text of Python's standard library."""


def _as_sources(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of --data: one source, which may stand alone, or several with or without weights."""
    return (words,) if isinstance(words, str) else tuple(words)


@frozen(kw_only=True)
class DataOptions:
    """The data of a run, and the passes over them."""

    data: tuple[str, ...] = option((STDLIB,), convert=_as_sources, noted=False)  # a digest tells whether they changed
    (
        """"stdlib" (the text of Python's standard library), a file or a folder of text, or prefixes of indexed """
        """datasets: A B, or with weights 0.3 A 0.7 B. Or "synthetic": made-up tokens, labels and images, for trials."""
    )
    split: str | None = None
    """Shares of training, validation and test of indexed datasets. [default: 969,30,1]"""
    epochs: Annotated[float | None, IN_EPOCHS] = option(
        None,
        check=positive("give a number above 0, such as 1 or 0.5"),
        kept=False,  # run.json has the steps
    )
    """Passes over the training text, instead of --steps."""


@frozen(kw_only=True)
class StartOptions:
    """Weights and steps that a run starts with, and the time that its ranks wait for one another."""

    weights: Path | None = option(None, flag="--from", kept=False, repeated=False)  # a run that continues has its own
    (
        "The initial weights: a run or a packed run, whose model is trained anew; a Hugging Face folder with "
        "config.json and safetensors; or a checkpoint of Megatron-LM. [default: random weights]"
    )
    steps_from: str | None = None  # in Python also an object with steps
    (
        """A class with steps of your own, file.py:Class, or with arguments, 'file.py:Class(alpha=0.25)'. "none" is """
        """the loss of the model. [default: that of the run that continues, else none]"""
    )
    distributed_timeout_minutes: Annotated[float, IN_MINUTES] = option(
        10.0, check=positive("give minutes above 0, such as 10"), kept=False, compared=False
    )
    """Minutes that ranks wait for one another before the run ends with an error."""

    @property
    def distributed_timeout(self) -> timedelta:
        """Return the time that ranks wait for one another."""
        return timedelta(minutes=self.distributed_timeout_minutes)


@frozen(kw_only=True)
class KernelOptions:
    """The library whose modules compute the layers of a run."""

    backend: Backend = option(Backend.AUTO, convert=Backend)
    (
        "te: Transformer Engine computes attention and experts in bf16 on GPUs, torch the rest. auto: te where it is "
        "installed, else torch. Checkpoints do not depend on it."
    )


@frozen(kw_only=True)
class SavingOptions:
    """The folder of a run, its saves, and the checkpoints that it keeps."""

    out: Path | None = option(None, kept=False)  # run.json is in it
    """Folder for checkpoints and metrics. [default: the run's, runs/MODEL, or runs/from-RUN with --from RUN alone]"""
    save_every: Annotated[int, IN_STEPS] = option(100, check=at_least(1))
    """Steps between checkpoints."""
    save_every_epoch: bool = False
    """Save at the end of each epoch too, as step-000200-epoch-1."""
    keep_last: Annotated[int, IN_CHECKPOINTS] = option(2, check=at_least(1))
    """Number of newest checkpoints to keep."""
    keep_best: Annotated[int, IN_CHECKPOINTS] = option(0, check=at_least(0))
    (
        "Number of checkpoints with the lowest validation loss to keep as well. Each is evaluated when it is saved, "
        "and its folder is named after the loss."
    )
    async_save: bool | None = None
    """Train on while a checkpoint is written, from a copy in host memory. [default: on GPUs]"""


@frozen(kw_only=True)
class EvaluationOptions:
    """Evaluations of a run on held-out data: when, on how much, and with which micro-batch."""

    evaluate_every: Annotated[int, IN_STEPS] = option(100, check=at_least(1))
    """Steps between evaluations on held-out text."""
    evaluate_every_epoch: bool = False
    """Evaluate at the end of each epoch too, a pass over the training text."""
    evaluate_batches: Annotated[int | None, IN_BATCHES] = option(None, check=at_least(1))
    (
        "Global batches of held-out text that each evaluation reads. [default: 65,536 tokens, and at the end as many "
        "as the run has trained on]"
    )
    evaluate_all: bool = False
    """Read all held-out text in the evaluation at the end, however long it takes."""
    evaluate_micro_batch: Annotated[int | None, IN_SEQUENCES] = option(None, check=at_least(1))
    """Sequences per micro-batch of evaluations. [default: that of training]"""

    def __attrs_post_init__(self) -> None:
        """Raise UserError for options that exclude each other."""
        if self.evaluate_all and self.evaluate_batches is not None:
            raise UserError(
                f"--evaluate-all and --evaluate-batches {self.evaluate_batches} exclude each other\ngive one of them"
            )
