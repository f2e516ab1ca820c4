"""Lines that a resumed run prints: the checkpoint it goes on from, and options and data that have changed since."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attrs import fields

from megaloom.runtime.checkpoints.checkpoint_folder import Checkpoint
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.samples.end_of_document import EndOfDocument

from .steps_reference import DIGEST_OPTION, OBJECT_OPTION, STEPS_OPTION
from .training_run import TrainingRun

SAVING = (
    *("split", "save_every", "evaluate_every", "evaluate_batches", "evaluate_all"),
    *("keep_last", "keep_best", "async_save"),
    *("evaluate_every_epoch", "save_every_epoch", "evaluate_micro_batch"),
    *(STEPS_OPTION, OBJECT_OPTION),
    *(f.name for f in fields(EndOfDocument)),
)
"""Options of data and checkpoints that a resumed run may change. Other data are found by their digest."""


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
    yield from _workload_notes(saved.workload, run.plan.workload.as_saved())
    new = recipe.as_saved()
    if changed := _changed(saved.recipe, new, (n for n in saved.recipe if n in new and n != "steps")):
        yield f"recipe: {changed}"
    if changed := _changed(run.options_before or {}, run.options, SAVING):
        yield f"options: {changed}"
    before, ref = run.options_before or {}, run.options.get(STEPS_OPTION)
    if ref == before.get(STEPS_OPTION) and run.options.get(DIGEST_OPTION) != before.get(DIGEST_OPTION):
        yield f"steps: the file of {ref} has changed since step {saved.step}"
    end = recipe.schedule_end
    if recipe.schedule.has_end and end is not None and end < steps:
        yield f"learning rate: its schedule ends at step {end}; --decay-steps {steps} would stretch it"
    if saved.data != run.corpus.digest:
        yield f"data: not the text of step {saved.step}, or its files have changed since"


def _workload_notes(before: Mapping[str, int | str], now: Mapping[str, int | str]) -> Iterator[str]:
    """Yield a line for each of sequence length, batch and precision that has changed since the checkpoint."""
    for name in before:
        if before[name] != now[name]:
            text = ": the order of the text starts anew, so some of it repeats and some is left out"
            yield f"{name}: was {before[name]}, is now {now[name]}{text if name == 'seq' else ''}"


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return a text with the options of these names that differ. Those that are not given are None."""
    return ", ".join(
        f"{name.replace('_', '-')} was {_shown(before.get(name))}, is now {_shown(now.get(name))}"
        for name in names
        if before.get(name) != now.get(name)
    )


def _shown(value: float | str | bool | None) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
