"""The scoreboard of the cost model, as a table for people and as one for a README."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import mean, median

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .coverage import coverage
from .validate import Group, Predicted, Validation, p90

NAMED = ("source", "GPU", "precision", "model")
SCORES = (
    *("rows", "left out", "median", "90 %", "bias", "pairs", "regret", "of 3"),
    *("GiB rows", "median", "mean", "max", "bias", "under", "OOM"),
)
REASONS = 12  # of rows that are left out, the most frequent ones are shown


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
    for name in ("rows", "5 %", "95 %", "to check", "held"):
        table.add_column(name, justify="right")
    for x in coverage(found.rows):
        ends = ["", ""] if x.spread is None else [f"{end:.2f}" for end in x.spread]
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


def markdown(groups: Iterable[Group]) -> str:
    """The same for a README, time and memory alike."""
    lines = [f"| {' | '.join((*NAMED, *SCORES))} |", "|---" * len((*NAMED, *SCORES)) + "|"]
    lines += [f"| {' | '.join(cells(g))} |" for g in groups if g.rows]
    return "\n".join(lines)


def sources(rows: Iterable[Predicted]) -> str:
    """For a README a line for each source, and one for all: errors of step time, and how many intervals hold it."""
    by: dict[str, list[Predicted]] = defaultdict(list)
    for p in rows:
        if p.time_error is not None:
            by[p.run.source].append(p)
    every = [p for found in by.values() for p in found]
    lines = ["| source | rows | median | 90 % | bias | held |", "|---" * 6 + "|"]
    return "\n".join(
        [*lines, *(_source(*one) for one in sorted(by.items())), *([_source("all", every)] if every else [])]
    )


def _source(name: str, rows: list[Predicted]) -> str:
    errors = [p.time_error or 0.0 for p in rows]
    off = [abs(e) for e in errors]
    shares = (median(off), p90(off), mean(errors), mean(p.held for p in rows))
    return f"| {' | '.join((name, str(len(rows)), *map(percent, shares)))} |"
