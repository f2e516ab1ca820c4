"""Lines that a resumed run prints: the checkpoint it goes on from, and options and data that have changed since."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attrs import fields_dict

from megaloom.runtime.checkpoints.checkpoint_folder import Checkpoint
from megaloom.runtime.optimizer.recipe import Recipe

from .run_options import OPTIONS
from .training_run import TrainingRun


def resume_notes(resumed: Checkpoint, run: TrainingRun, recipe: Recipe) -> Iterator[str]:
    """Yield lines about the checkpoint that a run goes on from. recipe: with the end of the schedule that it keeps."""
    for problem in resumed.skipped:
        yield f"skipped: {problem}"
    saved, steps = resumed.manifest, run.recipe.steps
    progress = "the finished run" if saved.step >= steps else f"step {saved.step} of {steps}"
    yield f"resumed from {progress} ({resumed.folder})"
    if weights := run.options.start.weights:
        yield f"--from {weights} is not read again: this run has started from it, or without"
    if not saved.has_comparable_fingerprint:
        yield "saved by an earlier megaloom: its weights have the names and shapes of this model's"
    if saved.layout != str(run.plan.layout):
        yield f"layout: saved under {saved.layout}, now {run.plan.layout}"
    yield from _workload_notes(saved.workload, run.plan.workload.as_saved())
    new = recipe.as_saved()
    if changed := _changed(saved.recipe, new, (n for n in saved.recipe if n in new and OPTIONS[n].noted)):
        yield f"recipe: {changed}"
    yield from option_notes(run, saved.step)
    end = recipe.schedule_end
    if recipe.schedule.has_end and end is not None and end < steps:
        yield f"learning rate: its schedule ends at step {end}; --decay-steps {steps} would stretch it"
    if saved.data != run.corpus.digest:
        yield f"data: not the text of step {saved.step}, or its files have changed since"


def option_notes(run: TrainingRun, step: int) -> Iterator[str]:
    """Yield a line about the options that have changed since run.json was written, and one if the file of steps has.

    The recipe is compared with that of the checkpoint.
    """
    before, now = (run.before or run.file), run.file
    names = [o.name for o in OPTIONS.values() if o.noted and o.name not in fields_dict(Recipe)]
    if changed := _changed(before.values, now.values, [*names, "steps_object"]):
        yield f"options: {changed}"
    ref = now.options.start.steps_from
    if ref == before.options.start.steps_from and now.steps_digest != before.steps_digest:
        yield f"steps: the file of {ref} has changed since step {step}"


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
