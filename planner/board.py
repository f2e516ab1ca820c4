"""The scoreboard of the cost model, as a table for people and as one for a README."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .validate import Group, Validation

REASONS = 12  # of rows that are left out, the most frequent ones are shown


def board(found: Validation) -> RenderableType:
    """The scores by group, and why rows were left out."""
    table = Table(box=None, pad_edge=False)
    for name in ("source", "GPU", "precision", "model"):
        table.add_column(name)
    for name in (
        "rows",
        "left out",
        "median",
        "90 %",
        "bias",
        "pairs",
        "regret",
        "of 3",
        "GiB rows",
        "mean",
        "max",
        "bias",
    ):
        table.add_column(name, justify="right")
    for g in found.groups:
        if g.rows:
            table.add_row(*cells(g))
    left = Counter((s.reason, s.source) for s in found.skipped)
    lines = [f"{n:4} {source}: {reason}" for (reason, source), n in left.most_common(REASONS)]
    rest = sum(left.values()) - sum(n for _, n in left.most_common(REASONS))
    lines += [f"{rest:4} for other reasons (--json has them all)"] if rest else []
    head = Text(
        "Errors of step time, pairs of layouts in the right order, regret of the choice; errors of memory", "bold"
    )
    return Lines(head, table, Text(f"\n{sum(left.values())} rows left out", "bold"), Text("\n".join(lines)))


def cells(g: Group) -> list[str]:
    """One group's row."""
    time = (g.median_abs_error, g.p90_abs_error, g.bias, g.pair_accuracy, g.top1_regret, g.top3_regret)
    memory = (g.memory_mean_abs_error, g.memory_max_abs_error, g.memory_bias)
    named = [g.source, g.gpu, g.precision, "experts" if g.sparse else "dense", str(g.rows), str(g.skipped)]
    return [*named, *map(percent, time), str(g.memory_rows or ""), *map(percent, memory)]


def percent(share: float | None) -> str:
    """A share as people read it; nothing where there is none."""
    return "" if share is None else f"{share:.1%}"


def markdown(groups: Iterable[Group]) -> str:
    """The same for a README, time and memory alike."""
    head = "source | GPU | precision | model | rows | median | 90 % | bias | pairs | regret | GiB rows | mean | max"
    lines = [f"| {head} |", "|" + "---|" * (head.count("|") + 1)]
    for g in groups:
        if g.rows:
            c = cells(g)
            lines.append(f"| {' | '.join([*c[:5], *c[6:11], *c[12:15]])} |")
    return "\n".join(lines)
