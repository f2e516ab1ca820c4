"""What a run tells: a line of JSON for every event, always; progress, live on a terminal and as plain lines in a pipe.

Rank 0 alone has these: losses are the same on every rank.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from attrs import frozen
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

LINE_SECONDS = 5.0  # between lines in a pipe
WINDOW = 20  # steps over which speed is averaged


@frozen(kw_only=True)
class Step:
    """What one optimizer step gave; its fields are those of a line of the metrics file."""

    step: int
    loss: float  # nats a token
    grad_norm: float
    lr: float
    tokens: int  # consumed, from the run's start
    seconds: float


class Journal:
    """The metrics file: one JSON object a line, in the order of events, no step twice. Without a path, nothing."""

    def __init__(self, path: Path | None, *, step: int) -> None:
        """Open it to go on after `step`: what an interrupted run wrote about later ones is dropped."""
        self.file: IO[str] | None = None
        if path:
            kept = [line for line in _lines(path) if _step(line) <= step]
            aside = path.with_name(f"{path.name}.tmp")
            aside.write_text("".join(kept))
            aside.replace(path)
            self.file = path.open("a", buffering=1)

    def write(self, event: str, *, step: int, **figures: float | str) -> None:
        """One line."""
        if self.file:
            self.file.write(json.dumps({"event": event, "step": step, **figures}) + "\n")


def _lines(path: Path) -> Iterator[str]:
    """The whole lines of a file, if it is there; a last one that was cut short is none."""
    if path.exists():
        with path.open(errors="replace") as file:
            yield from (line for line in file if line.endswith("\n"))


def _step(line: str) -> float:
    """The step that a line is of; infinite if it is no line of ours, as a machine that lost power may leave."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


class Screen(Console):
    """A console that takes a reader's leave as a signal to stop, where rich would end the process without a save."""

    def __init__(self, caught: list[int]) -> None:
        super().__init__()
        self.caught = caught

    def on_broken_pipe(self) -> None:
        """Write no more."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
        self.caught.append(signal.SIGPIPE)


class Display:
    """Where a run shows how it goes. In a pipe: the first step, the last, and one every few seconds between."""

    wide = True  # room for all figures

    def __init__(self, console: Console, *, steps: int, step_tokens: int) -> None:
        self.console, self.steps, self.step_tokens = console, steps, step_tokens
        self.start, self.last = time.monotonic(), -math.inf
        self.seconds: deque[float] = deque(maxlen=WINDOW)  # of the last steps

    def step(self, step: Step) -> None:
        """One more step is done."""
        self.seconds.append(step.seconds)
        mean = sum(self.seconds) / len(self.seconds)
        left = (self.steps - step.step) * mean
        figures = [
            f"loss {step.loss:.4f}",
            f"{self.step_tokens / mean:,.0f} tokens/s",
            f"{clock(time.monotonic() - self.start)} elapsed",
            f"{clock(left)} left",
        ]
        if self.wide:
            figures += [f"grad norm {step.grad_norm:.2f}", f"lr {step.lr:.1e}"]
        self.show(step.step, "  ".join(figures))

    def show(self, step: int, line: str) -> None:
        """Show one step's line, if it is time."""
        now = time.monotonic()
        if now - self.last >= LINE_SECONDS or step == self.steps:
            self.last = now
            self.say(f"step {step}/{self.steps}  {line}")

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class Live(Display):
    """On a terminal: one line with a bar, redrawn at each step."""

    def __init__(self, console: Console, progress: Progress, *, steps: int, step_tokens: int, done: int) -> None:
        super().__init__(console, steps=steps, step_tokens=step_tokens)
        self.progress, self.wide = progress, console.width >= 120
        self.task = progress.add_task("", total=steps, completed=done, line="")

    def show(self, step: int, line: str) -> None:
        self.progress.update(self.task, completed=step, line=line)
        self.progress.refresh()


@contextmanager
def display(console: Console, *, steps: int, done: int, step_tokens: int) -> Iterator[Display]:
    """Progress from step `done` to `steps`, on a terminal or in a pipe."""
    if not console.is_terminal:
        yield Display(console, steps=steps, step_tokens=step_tokens)
        return
    columns = (
        TextColumn("step {task.completed}/{task.total}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[line]}", markup=False, table_column=Column(no_wrap=True)),
    )
    # Drawn at each step, and by no thread of its own: that would take time from training.
    with Progress(*columns, console=console, auto_refresh=False, expand=True) as progress:
        yield Live(console, progress, steps=steps, step_tokens=step_tokens, done=done)


def clock(seconds: float) -> str:
    """Seconds as people read them: 1:05, 2:03:07."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
