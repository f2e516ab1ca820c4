"""A training run as values: what a rank must know to train, and the result."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from megaloom.planner.contract.plans import Plan

from .data import Corpus
from .recipe import Recipe

RECENT_STEPS = 20
"""Steps over which the summary averages the training loss."""

EVALUATION_TOKENS = 65536
"""Approximate number of held-out tokens that one evaluation reads."""


@frozen(kw_only=True)
class TrainingRun:
    """All that a rank must know: what to compute (plan, recipe, corpus), where to write, how often to save."""

    plan: Plan
    recipe: Recipe
    corpus: Corpus
    folder: Path
    save_every: int  # steps
    evaluate_every: int  # steps

    @property
    def evaluation_batches(self) -> int:
        """Return the global batches of one evaluation: at most those that the held-out text has."""
        workload = self.plan.workload
        available = self.corpus.held_out.windows(workload.seq) // workload.batch
        return max(1, min(EVALUATION_TOKENS // workload.tokens, available))


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
    train_loss: float | None  # mean of the last steps, nats per token
    held_out_loss: float | None  # nats per token; None if stopped
    unigram_entropy: float  # of the held-out text, nats per token
    peak_nbytes: tuple[int, ...]  # by rank
    checkpoint: Path
