"""The scoreboard of the cost model, as a table for people and as one for a README."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from enum import StrEnum
from statistics import mean, median

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .coverage import coverage, fits
from .scoring import (
    Group,
    Predicted,
    Validation,
    p90,
)

NAMED = ("source", "GPU", "precision", "model")
SCORES = (
    *("rows", "left out", "median", "90 %", "bias", "pairs", "regret", "of 3"),
    *("GiB rows", "median", "mean", "max", "bias", "under", "OOM"),
)
SUMMARY = ("rows", "median", "mean", "90 %", "bias", "held")
CHECKING = tuple(f"{name} to check" for name in SUMMARY)  # of the half that nothing was fitted to
REASONS = 12  # of rows that are left out, the most frequent ones are shown


class By(StrEnum):
    """What has a line of its own."""

    GROUP = "group"  # source, GPU, precision and kind of model
    SOURCE = "source"
    KIND = "kind"  # of runs that have an interval of their own


def board(found: Validation) -> RenderableType:
    """The scores by group, and why rows were left out."""
    table = Table(box=None, pad_edge=False)
    for name in NAMED:
        table.add_column(name)
    for name in SCORES:
        table.add_column(name, justify="right")
    for g in found.groups:
        if g.rows:
            table.add_row(*cells(g))
    left = Counter((s.reason, s.source) for s in found.skipped)
    lines = [f"{n:4} {source}: {reason}" for (reason, source), n in left.most_common(REASONS)]
    rest = sum(left.values()) - sum(n for _, n in left.most_common(REASONS))
    lines += [f"{rest:4} for other reasons (--json has them all)"] if rest else []
    head = Text(
        "Errors of step time, pairs of layouts in the right order, regret of the choice; errors of memory, "
        "rows under its upper bound",
        "bold",
    )
    return Lines(
        head, table, intervals(found), Text(f"\n{sum(left.values())} rows left out", "bold"), Text("\n".join(lines))
    )


def intervals(found: Validation) -> RenderableType:
    """The spread of each kind of run, and how many of the other half of the models the intervals hold."""
    table = Table("", box=None, pad_edge=False)
    for name in ("rows", "from", "to", "to check", "held"):
        table.add_column(name, justify="right")
    for x in coverage(found.rows):
        ends = ["", ""] if x.interval is None else [f"{end:.2f}" for end in x.interval]
        table.add_row(x.kind, str(x.fitted), *ends, str(x.checked), percent(x.held / x.checked) if x.checked else "")
    head = Text(
        "\nMeasured / predicted in one half of the models, and runs of the other that the intervals hold", "bold"
    )
    return Lines(head, table)


def cells(g: Group) -> list[str]:
    """One group's row."""
    time = (g.median_abs_error, g.p90_abs_error, g.bias, g.pair_accuracy, g.top1_regret, g.top3_regret)
    memory = (
        *(g.memory_median_abs_error, g.memory_mean_abs_error, g.memory_max_abs_error, g.memory_bias),
        g.memory_covered,
    )
    named = [g.source, g.gpu, g.precision, "experts" if g.sparse else "dense", str(g.rows), str(g.skipped)]
    return [*named, *map(percent, time), str(g.memory_rows or ""), *map(percent, memory), ooms(g)]


def ooms(g: Group) -> str:
    """How many of the rows that ran out of memory were predicted to, and how many that ran were too."""
    said = [f"{g.oom_found} of {g.oom_rows}"] if g.oom_rows else []
    said += [f"{g.oom_false} wrongly"] if g.oom_false else []
    return ", ".join(said)


def percent(share: float | None) -> str:
    """A share as people read it; nothing where there is none."""
    return "" if share is None else f"{share:.1%}"


def markdown(found: Validation, by: By) -> str:
    """The same for a README: a line for each group, time and memory alike; or for each source or kind of runs."""
    if by is By.GROUP:
        return _markdown((*NAMED, *SCORES), [cells(g) for g in found.groups if g.rows])
    return _markdown((by.value, *SUMMARY, *(CHECKING if by is By.KIND else ())), summaries(found.rows, by))


def _markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    first, *rest = (f"| {' | '.join(line)} |" for line in (head, *lines))
    return "\n".join([first, "|---" * len(head) + "|", *rest])


def summaries(rows: Iterable[Predicted], by: By) -> list[list[str]]:
    """A line for each source or kind of runs, and one for all: step times; of kinds also those of the checking half."""
    found: dict[str, list[Predicted]] = defaultdict(list)
    for p in rows:
        if p.time_error is not None:
            found[p.kind if by is By.KIND else p.run.source].append(p)
    every = {"all": [p for some in found.values() for p in some]} if found else {}
    return [
        [name, *_summary(some), *(_summary([p for p in some if not fits(p)]) if by is By.KIND else ())]
        for name, some in (*sorted(found.items()), *every.items())
    ]


def _summary(rows: Sequence[Predicted]) -> list[str]:
    """How many, how far off, and how many were within their interval."""
    if not rows:
        return ["0", *[""] * (len(SUMMARY) - 1)]
    errors = [p.time_error or 0.0 for p in rows]
    off = [abs(e) for e in errors]
    shares = (median(off), mean(off), p90(off), mean(errors), mean(p.held for p in rows))
    return [str(len(rows)), *map(percent, shares)]
