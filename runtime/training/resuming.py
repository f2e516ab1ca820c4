"""Lines that a resumed run prints: the checkpoint it goes on from, and options and data that have changed since."""

from __future__ import annotations

from collections.abc import Iterator

from megaloom.runtime.checkpoints.checkpoint_folder import Checkpoint
from megaloom.runtime.checkpoints.manifest import Manifest
from megaloom.runtime.optimizer.recipe import Recipe

from .training_run import TrainingRun


def resume_notes(resumed: Checkpoint, run: TrainingRun, recipe: Recipe) -> Iterator[str]:
    """Yield lines about the checkpoint that a run goes on from. recipe: with the end of the schedule that it keeps."""
    for problem in resumed.skipped:
        yield f"skipped: {problem}"
    saved, steps = resumed.manifest, run.recipe.steps
    progress = "the finished run" if saved.step >= steps else f"step {saved.step} of {steps}"
    yield f"resumed from {progress} ({resumed.folder})"
    if run.weights:
        yield f"--from {run.weights} is not read again: this run has started from it, or without"
    if not saved.has_comparable_fingerprint:
        yield "saved by an earlier megaloom: its weights have the names and shapes of this model's"
    if saved.layout != str(run.plan.layout):
        yield f"layout: saved under {saved.layout}, now {run.plan.layout}"
    if changed := _changed_options(saved, recipe):
        yield f"recipe: {changed}"
    end = recipe.schedule_end
    if recipe.schedule.has_end and end is not None and end < steps:
        yield f"learning rate: its schedule ends at step {end}; --decay-steps {steps} would stretch it"
    if saved.data != run.corpus.digest:
        yield f"data: not the text of step {saved.step}, or its files have changed since"


def _changed_options(saved: Manifest, recipe: Recipe) -> str:
    new = recipe.as_saved()
    return ", ".join(
        f"{name.replace('_', '-')} was {_shown(value)}, is now {_shown(new[name])}"
        for name, value in saved.recipe.items()
        if name != "steps" and name in new and value != new[name]
    )


def _shown(value: float | str | bool) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
