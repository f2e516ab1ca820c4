"""Progress of a run: figures redrawn on a terminal, lines in a pipe. Only rank 0 shows it."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megaloom.planner.contract.plans import Plan
from megaloom.runtime.engine.results import EvaluationResult

from .metrics_file import StepMetrics

PRINT_SECONDS = 5.0  # between progress lines in a pipe
REDRAW_SECONDS = 0.1  # between drawings on a terminal
CLOCK_SECONDS = 60.0  # by which the clock of a machine moves before it is said
AVERAGED_STEPS = 20  # over which speed is averaged
GAP = "  "  # between figures


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

    seconds_between = PRINT_SECONDS

    def __init__(self, console: Console, plan: Plan, steps: int) -> None:
        self.console, self.plan, self.steps = console, plan, steps
        self.start, self.last_shown, self.clock_offset = time.monotonic(), -math.inf, clock_offset()
        self.recent: deque[StepMetrics] = deque(maxlen=AVERAGED_STEPS)
        self.skipped = 0
        self.evaluation, self.first_part = (
            (-1, ""),
            0,
        )  # step and name of the last evaluation, tokens of its first batch
        self.evaluation_start = self.evaluation_shown = 0.0

    def show_step(self, step: StepMetrics) -> None:
        """Show the metrics of a step that is done, if enough time has passed."""
        self.recent.append(step)
        self.skipped += step.skipped
        now = time.monotonic()
        if now - self.last_shown >= self.seconds_between or step.step == self.steps:
            self.last_shown = now
            self.draw(step)
            self.name_moved_clock()

    def show_evaluation(self, step: int, name: str, done: int, tokens: int) -> None:
        """Show how much of an evaluation is done, if enough time has passed since its first batch or the last line."""
        now = time.monotonic()
        if self.evaluation != (step, name):
            self.evaluation, self.first_part, self.evaluation_start = (step, name), done, now
            self.evaluation_shown = now
        elif done < tokens and now - self.evaluation_shown >= self.seconds_between:
            self.evaluation_shown = now
            left = (tokens - done) * (now - self.evaluation_start) / (done - self.first_part)
            self.draw_evaluation(f"step {step}  evaluated {done:,} of {tokens:,} {name} tokens{GAP}{clock(left)} left")
        if done == tokens:
            self.draw_evaluation("")

    def draw_evaluation(self, text: str) -> None:
        """Print the line of an evaluation; "" at its end."""
        if text:
            self.print(text)

    def name_moved_clock(self) -> None:
        """Print how far the clock has moved since the last call, if it has."""
        before, self.clock_offset = self.clock_offset, clock_offset()
        moved = self.clock_offset - before
        if abs(moved) >= CLOCK_SECONDS:
            where = "ahead" if moved > 0 else "back"
            self.print(
                f"the clock of this machine was set {where} by {clock(abs(moved))}; the times shown here do not change"
            )

    def draw(self, step: StepMetrics) -> None:
        """Print the line of a step."""
        parts = [f"step {step.step}/{self.steps}", *training_figures(step, self.skipped), *self.speed_figures()]
        self.print(GAP.join([*parts, *self.times(step)]))

    def speed_figures(self) -> list[str]:
        """Return speed, the mean of the last steps, and memory."""
        return speed_figures(self.plan, list(self.recent))

    def times(self, step: StepMetrics) -> list[str]:
        """Return the time since the start, and the time that is left at the mean speed of the last steps."""
        mean = sum(each.seconds for each in self.recent) / len(self.recent)
        left = clock((self.steps - step.step) * mean)
        return [f"{clock(time.monotonic() - self.start)} elapsed", f"{left} left"]

    def print(self, text: str) -> None:
        """Print a line that stays on the screen."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay(ProgressDisplay):
    """Progress on a terminal: a bar and all figures below it, redrawn in place."""

    seconds_between = REDRAW_SECONDS

    def __init__(self, console: Console, plan: Plan, steps: int, live: Live) -> None:
        super().__init__(console, plan, steps)
        self.live, self.drawn = live, Group()

    def draw(self, step: StepMetrics) -> None:
        """Redraw the bar and the figures."""
        self.drawn = self.picture(step)
        self.live.update(self.drawn, refresh=True)

    def draw_evaluation(self, text: str) -> None:
        """Redraw the line below the figures, which shows how much of an evaluation is done."""
        self.live.update(Group(self.drawn, Text(text)) if text else self.drawn, refresh=True)

    def picture(self, step: StepMetrics) -> Group:
        """Return the bar with the step and the times, and two rows of figures."""
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        bar = ProgressBar(total=self.steps, completed=step.step)
        head.add_row(Text(f"step {step.step}/{self.steps}"), bar, Text(GAP.join(self.times(step))))
        rows = training_figures(step, self.skipped), self.speed_figures()
        return Group(head, *(Padding(Text(GAP.join(row)), (0, 0, 0, 2)) for row in rows))


def training_figures(step: StepMetrics, skipped: int) -> list[str]:
    """Return loss, its terms, the report of the step, learning rate, gradient norm; loss scale and skipped steps."""
    return [
        f"loss {step.loss:.4f}",
        *(f"{name} {value:.4f}" for name, value in step.terms.items()),
        *(f"{name} {value:.4g}" for name, value in step.report.items()),
        f"lr {step.lr:.1e}",
        f"grad norm {step.grad_norm:.2f}",
        *([] if step.loss_scale is None else [f"loss scale {step.loss_scale:g}"]),
        *([f"{skipped} skipped"] if skipped else []),
    ]


def speed_figures(plan: Plan, steps: list[StepMetrics]) -> list[str]:
    """Return tokens/s, TFLOP/s and MFU of each device, the mean of some steps, and the peak memory."""
    seconds, each = sum(step.seconds for step in steps), device_word(plan)

    def mean(name: str) -> float | None:
        values = [getattr(step, name) for step in steps]
        weighted = (value * step.seconds for value, step in zip(values, steps, strict=True))
        return None if None in values else sum(weighted) / seconds

    flops, mfu = mean("flops_per_second_per_device"), mean("mfu")
    return [
        f"{mean('tokens_per_second_per_device'):,.0f} tokens/s/{each}",
        *([] if flops is None else [f"{tflops_text(flops)} TFLOP/s/{each}"]),
        *([] if mfu is None or mfu > 1 else [f"MFU {mfu:.1%}"]),  # see `mfu_text`
        f"memory {nbytes_text(steps[-1].peak_nbytes)}",
    ]


def mfu_text(mfu: float) -> str:
    """Return an MFU, or why there is none: a step does more FLOPs than the peak that the plan assumes.

    The peaks of CPUs are no datasheet's but those of one measured product, and torch's fp16 on CPU has kernels of very
    different speed.
    """
    return f"{mfu:.1%}" if mfu <= 1 else "not known: the step is faster than the peak that the plan assumes"


def device_word(plan: Plan) -> str:
    """Return "GPU", or "process" on CPU."""
    return "process" if plan.cluster.device.name == "CPU" else "GPU"


def tflops_text(flops: float) -> str:
    """Return FLOP/s in TFLOP/s, with three digits."""
    return f"{flops / 1e12:,.0f}" if flops >= 1e14 else f"{flops / 1e12:.3g}"


def nbytes_text(nbytes: int) -> str:
    """Return bytes in GiB, or MiB below 1 GiB."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


@contextmanager
def progress_display(console: Console, plan: Plan, *, steps: int) -> Iterator[ProgressDisplay]:
    """Show progress up to step `steps`, on a terminal or in a pipe."""
    if not console.is_terminal:
        yield ProgressDisplay(console, plan, steps)
        return
    # Redrawn at steps instead of by rich's own thread, which would take time from training.
    with Live(console=console, auto_refresh=False) as live:
        yield LiveDisplay(console, plan, steps, live)


def loss_text(result: EvaluationResult, unit: str, digits: int = 4) -> str:
    """Return the loss of an evaluation with its unit, its terms, perplexity, scores, and the report of the step."""
    whole = result.cross_entropy in (None, result.loss)
    parts = [f"loss {result.loss:.{digits}f}{f' {unit}' if whole and unit else ''}"]
    parts += [f"{name} {value:.{digits}f}" for name, value in result.terms.items()]
    if result.perplexity is not None:
        parts.append(f"perplexity {result.perplexity:.3f}")
    if result.scores is not None:
        parts.append(f"accuracy {result.scores.accuracy:.4f}, macro F1 {result.scores.macro_f1:.4f}")
    parts += [f"{name} {value:.4g}" for name, value in result.report.items()]
    return ", ".join(parts)


def clock_offset() -> float:
    """Return the seconds between the clock of this machine, which may be set, and the one that measures durations."""
    return time.time() - time.monotonic()


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, or hours, minutes and seconds: 1:05, 2:03:07."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
