"""Metrics of a run: metrics.jsonl with one JSON object per event, and progress on the terminal or in a pipe.

Only rank 0 writes: losses are equal on all ranks. `MetricsFile` is the file, `progress_display` the progress.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from attrs import field, frozen
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from megaloom.runtime.engine.results import EvaluationResult

PRINT_SECONDS = 5.0  # between progress lines in a pipe
AVERAGED_STEPS = 20  # over which speed is averaged
WIDE_TERMINAL = 120  # columns from which a terminal shows all figures


@frozen(kw_only=True)
class StepMetrics:
    """Metrics of one optimizer step. The fields are those of a "step" event in metrics.jsonl."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int  # consumed since the first step
    seconds: float
    skipped: bool = False  # loss or gradients were not finite, so no weight has changed
    loss_scale: float | None = None  # of fp16
    terms: Mapping[str, float] = field(factory=dict)  # of the loss, if it has several, and the balancing loss


class MetricsFile:
    """metrics.jsonl: one JSON object per line, in the order of events, no step twice. Without a path, nothing."""

    def __init__(self, path: Path | None, *, last_step: int) -> None:
        """Open the file to append after `last_step`; lines of later steps, from an interrupted run, are dropped."""
        self.file: IO[str] | None = None
        if path:
            lines = [line for line in _complete_lines(path) if _step_of(line) <= last_step]
            unfinished = path.with_name(f"{path.name}.tmp")
            unfinished.write_text("".join(lines))
            unfinished.replace(path)
            self.file = path.open("a", buffering=1)

    def write(self, event: str, *, step: int, **values: object) -> None:
        """Append one event. A value that is NaN or infinite, which JSON does not have, is written as null."""
        if self.file:
            self.file.write(json.dumps({"event": event, "step": step, **_finite(values)}) + "\n")


def _finite(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values that JSON can hold, with None for NaN and infinity."""
    return {
        name: _finite(v) if isinstance(v, Mapping) else None if isinstance(v, float) and not math.isfinite(v) else v
        for name, v in values.items()
    }


def _complete_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, without a last one that was cut short; none if there is no file."""
    if path.exists():
        with path.open(errors="replace") as file:
            yield from (line for line in file if line.endswith("\n"))


def _step_of(line: str) -> float:
    """Return the step of a line; infinity if the line is damaged, as after a power failure."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


class InterruptibleConsole(Console):
    """A console that treats a closed pipe as a signal to stop, so that the run saves before it ends."""

    def __init__(self, signals: list[int]) -> None:
        super().__init__()
        self.signals = signals

    def on_broken_pipe(self) -> None:
        """Stop printing, and record SIGPIPE. (rich would end the process without a checkpoint.)"""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # takes what is still buffered
        self.signals.append(signal.SIGPIPE)


class ProgressDisplay:
    """Progress in a pipe: the first step, the last, and one line every PRINT_SECONDS between them."""

    shows_all_figures = True

    def __init__(self, console: Console, *, steps: int, step_tokens: int) -> None:
        self.console, self.steps, self.step_tokens = console, steps, step_tokens
        self.start, self.last_print = time.monotonic(), -math.inf
        self.recent_seconds: deque[float] = deque(maxlen=AVERAGED_STEPS)
        self.skipped = 0

    def show_step(self, step: StepMetrics) -> None:
        """Show the metrics of a step that is done."""
        self.recent_seconds.append(step.seconds)
        mean = sum(self.recent_seconds) / len(self.recent_seconds)
        figures = [
            f"loss {step.loss:.4f}",
            *(f"{name} {value:.4f}" for name, value in step.terms.items()),
            f"{self.step_tokens / mean:,.0f} tokens/s",
            f"{clock(time.monotonic() - self.start)} elapsed",
            f"{clock((self.steps - step.step) * mean)} left",
        ]
        if self.shows_all_figures:
            figures += [f"grad norm {step.grad_norm:.2f}", f"lr {step.lr:.1e}"]
        if step.loss_scale is not None:
            figures.append(f"loss scale {step.loss_scale:g}")
        self.skipped += step.skipped
        if self.skipped:
            figures.append(f"{self.skipped} skipped")
        self.show_line(step.step, "  ".join(figures))

    def show_line(self, step: int, line: str) -> None:
        """Print the line of a step, if enough time has passed."""
        now = time.monotonic()
        if now - self.last_print >= PRINT_SECONDS or step == self.steps:
            self.last_print = now
            self.print(f"step {step}/{self.steps}  {line}")

    def print(self, text: str) -> None:
        """Print a line that stays on the screen."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay(ProgressDisplay):
    """Progress on a terminal: one line with a bar, redrawn at each step."""

    def __init__(self, console: Console, progress: Progress, *, steps: int, step_tokens: int, done: int) -> None:
        super().__init__(console, steps=steps, step_tokens=step_tokens)
        self.progress, self.shows_all_figures = progress, console.width >= WIDE_TERMINAL
        self.task = progress.add_task("", total=steps, completed=done, line="")

    def show_line(self, step: int, line: str) -> None:
        """Redraw the progress line."""
        self.progress.update(self.task, completed=step, line=line)
        self.progress.refresh()


@contextmanager
def progress_display(console: Console, *, steps: int, done: int, step_tokens: int) -> Iterator[ProgressDisplay]:
    """Show progress from step `done` to `steps`, on a terminal or in a pipe."""
    if not console.is_terminal:
        yield ProgressDisplay(console, steps=steps, step_tokens=step_tokens)
        return
    columns = (
        TextColumn("step {task.completed}/{task.total}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[line]}", markup=False, table_column=Column(no_wrap=True)),
    )
    # Redrawn at each step instead of by rich's own thread, which would take time from training.
    with Progress(*columns, console=console, auto_refresh=False, expand=True) as progress:
        yield LiveDisplay(console, progress, steps=steps, step_tokens=step_tokens, done=done)


def loss_text(result: EvaluationResult, unit: str, digits: int = 4) -> str:
    """Return the loss of an evaluation with its unit and its terms; of predicted tokens, their perplexity too."""
    whole = result.cross_entropy in (None, result.loss)
    parts = [f"loss {result.loss:.{digits}f}{f' {unit}' if whole and unit else ''}"]
    parts += [f"{name} {value:.{digits}f}" for name, value in result.terms.items()]
    if result.perplexity is not None:
        parts.append(f"perplexity {result.perplexity:.3f}")
    return ", ".join(parts)


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, or hours, minutes and seconds: 1:05, 2:03:07."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
