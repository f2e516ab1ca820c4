"""A training run as values: what a rank must know to train, and the result."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from attrs import field, frozen

from megaloom.planner.contract.plans import Plan
from megaloom.runtime.data.corpus import Corpus
from megaloom.runtime.data.data_split import DataSplit
from megaloom.runtime.engine.results import EvaluationResult
from megaloom.runtime.metrics.stage_time import StageTime
from megaloom.runtime.optimizer.recipe import Recipe

from .run_folder import RunFile
from .run_options import RunOptions

RECENT_STEPS = 20
"""Steps over which the summary averages the training loss."""

EVALUATION_TOKENS = 65536
"""Most held-out tokens that an evaluation during training reads by default."""


@frozen(kw_only=True)
class TrainingRun:
    """All that a rank must know: what to compute (plan, recipe, corpus), where to write, and all options."""

    plan: Plan
    corpus: Corpus
    folder: Path
    file: RunFile  # with all options
    steps: object = None  # with any of the methods of `Steps`, or a `StepsReference`
    before: RunFile | None = None  # that the folder had, if it had one

    @property
    def options(self) -> RunOptions:
        """Return the options of the run."""
        return self.file.options

    @property
    def recipe(self) -> Recipe:
        """Return the recipe, with the steps of --epochs."""
        return self.options.recipe

    def evaluation_samples(self, data: DataSplit, seq: int) -> int:
        """Return the number of samples of an evaluation during training on a split of the data.

        seq: the tokens of text that each sample moves on by.
        """
        limit = max(1, EVALUATION_TOKENS // seq)
        if self.options.evaluation.evaluate_batches is not None:
            limit = self.options.evaluation.evaluate_batches * self.plan.workload.batch
        return min(data.held_out_samples(seq), limit)

    def last_evaluation_samples(self, data: DataSplit, seq: int, *, trained: int) -> int:
        """Return the number of samples of the evaluation at the end, after training on `trained` samples.

        By default no more than those: a forward pass takes less time than a training step, and the number does not
        depend on the machine's speed.
        """
        available = data.held_out_samples(seq)
        if self.options.evaluation.evaluate_all:
            return available
        if self.options.evaluation.evaluate_batches is not None:
            return self.evaluation_samples(data, seq)
        return min(available, trained)

    def extent_text(self, data: DataSplit, seq: int, samples: int) -> str:
        """Return a line on how much of a split of the data the evaluation at the end reads."""
        available, name = data.held_out_samples(seq), "test" if data is self.corpus.test else "held-out"
        unit, each = ("documents", 1) if data.rows else ("tokens", seq)
        if samples == available:
            return f"evaluating all {samples * each:,} {name} {unit}"
        of = f"{samples * each:,} of {available * each:,} {name} {unit}"
        if self.options.evaluation.evaluate_batches is not None:
            return f"evaluating {of} (--evaluate-batches {self.options.evaluation.evaluate_batches})"
        return f"evaluating {of}, as many as the run has trained on; --evaluate-all reads all"


@frozen(kw_only=True)
class Summary:
    """The result of a run."""

    step: int  # last step
    resumed: int | None  # step of the checkpoint that the run started from
    stopped: int  # number of the signal that stopped the run early; 0 if none did
    skipped: int  # steps of this run whose loss or gradients were not finite; they changed no weight
    tokens: int  # trained on in this run, without those before a resume
    seconds: float  # of this run
    step_seconds: float | None  # median
    train_loss: float | None  # mean of the last steps
    train_terms: Mapping[str, float]  # of these steps, as in `StepResult`
    train_report: Mapping[str, float] = field(factory=dict)  # of these steps, as in `StepResult`
    held_out: EvaluationResult | None  # at the end, on held-out data; None if stopped or nothing is held out
    test: EvaluationResult | None = None  # of the test split
    unigram_entropy: float | None  # of the held-out text, nats per token; None if the model predicts no tokens
    unit: str = "nats per token"  # of the loss
    counted: str = "tokens"  # what the loss is a mean over: tokens or samples
    peak_nbytes: tuple[int, ...]  # by rank
    checkpoint: Path
    stage_times: tuple[StageTime, ...] = ()  # of one step, by stage; none if no step was done
    trace: Path | None = None  # of the profiled step
    synthetic: bool = False  # the data are made up
    lowest_lr: float = 0.0  # at the end of the schedule
