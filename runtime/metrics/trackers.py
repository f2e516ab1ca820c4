"""Trackers: TensorBoard and Weights & Biases. Each takes the events of metrics.jsonl as curves, on rank 0.

A curve is EVENT/NAME, such as step/loss and evaluation/perplexity; its x axis is the step. A continued run continues
its curves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

from megaloom.dsl.errors import UserError

from .monitoring import Monitoring

Log = Callable[[int, Mapping[str, float]], None]
"""A function that takes a step and the values of curves."""

WANDB_ID = "wandb-id"
"""File in a run folder with the id of its run in Weights & Biases."""


def curves(event: str, values: Mapping[str, object]) -> dict[str, float]:
    """Return the values of an event that are finite numbers, by the names of their curves."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= curves(f"{event}/{name}", value)
        elif isinstance(value, int | float) and math.isfinite(value):
            found[f"{event}/{name}"] = float(value)
    return found


@contextmanager
def open_trackers(
    monitoring: Monitoring, run: Path, *, done: int, options: Mapping[str, object]
) -> Iterator[tuple[Log, ...]]:
    """Return the trackers of a run that goes on after step `done`, and close them. `options` describe the run."""
    with ExitStack() as stack:
        logs = []
        if folder := monitoring.tensorboard_folder(run):
            logs.append(stack.enter_context(_tensorboard(folder, done)))
        if monitoring.wandb:
            logs.append(stack.enter_context(_wandb(monitoring.wandb, run, options)))
        yield tuple(logs)


@contextmanager
def _tensorboard(folder: Path, done: int) -> Iterator[Log]:
    """Write event files. What an interrupted run wrote after step `done` is hidden."""
    from torch.utils.tensorboard import SummaryWriter

    try:
        writer = SummaryWriter(str(folder), purge_step=done + 1)
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror}\ngive another --tensorboard-dir") from None

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    try:
        yield log
    finally:
        writer.close()


@contextmanager
def _wandb(project: str, run: Path, options: Mapping[str, object]) -> Iterator[Log]:
    """Log into a run of a project. Its id is kept in the run folder, so that a continued run is the same run."""
    import wandb

    path = run / WANDB_ID
    if not path.is_file():
        path.write_text(token_hex(8))
    identity: dict[str, Any] = {
        "project": project,
        "name": run.resolve().name,
        "id": path.read_text().strip(),
        "resume": "allow",
    }
    try:
        tracked: Any = wandb.init(**identity, dir=str(run), config=dict(options), settings=wandb.Settings(silent=True))
    except wandb.errors.Error as error:
        first = str(error).strip().partition("\n")[0]
        raise UserError(f"W&B refuses the run: {first}\nlog in with `wandb login`, or set WANDB_MODE=offline") from None

    def log(step: int, values: Mapping[str, float]) -> None:
        tracked.log(dict(values), step=step)

    try:
        yield log
    finally:
        tracked.finish()
