"""Tables of the scores: for the terminal, as Markdown for documentation, and as JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from enum import StrEnum
from statistics import mean, median
from typing import Any

from attrs import asdict
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .coverage import coverage, in_fitting_half
from .scoring import Predicted, ScoreGroup, Validation, p90

GROUP_COLUMNS = ("source", "GPU", "precision", "model")
SCORE_COLUMNS = (
    *("runs", "left out", "median", "90 %", "bias", "pairs", "regret", "of 3"),
    *("memory runs", "median", "mean", "max", "bias", "below upper", "out of memory"),
)
SUMMARY_COLUMNS = ("runs", "median", "mean", "90 %", "bias", "inside interval")
CHECK_COLUMNS = tuple(f"{name} (check)" for name in SUMMARY_COLUMNS)  # of the models that no constant was fitted to
MAX_REASONS = 12


class TableBy(StrEnum):
    """Rows of a Markdown table."""

    GROUP = "group"  # source, GPU, precision and kind of model
    SOURCE = "source"
    KIND = "kind"  # class of runs, which has an interval of its own


def board(validation: Validation) -> RenderableType:
    """Return the scores by group, the coverage of the intervals, and the reasons for skipped rows."""
    table = Table(box=None, pad_edge=False)
    for name in GROUP_COLUMNS:
        table.add_column(name)
    for name in SCORE_COLUMNS:
        table.add_column(name, justify="right")
    for group in validation.groups:
        if group.rows:
            table.add_row(*group_cells(group))
    left = Counter((row.reason, row.source) for row in validation.skipped)
    lines = [f"{n:4} {source}: {reason}" for (reason, source), n in left.most_common(MAX_REASONS)]
    rest = sum(left.values()) - sum(n for _, n in left.most_common(MAX_REASONS))
    lines += [f"{rest:4} for other reasons (all: --json)"] if rest else []
    head = Text(
        "Error of step time; layout pairs in the right order; regret of the predicted choice.\n"
        "Error of memory; runs below its upper bound; runs out of memory that were predicted to be.",
        "bold",
    )
    skipped = Text(f"\nRows that were not predicted: {sum(left.values())}", "bold")
    return Lines(head, table, coverage_table(validation), skipped, Text("\n".join(lines)))


def coverage_table(validation: Validation) -> RenderableType:
    """Return the interval of each class of runs, and the share of the checking half inside of it."""
    table = Table("", box=None, pad_edge=False)
    for name in ("fitted runs", "from", "to", "checked runs", "inside"):
        table.add_column(name, justify="right")
    for line in coverage(validation.rows):
        ends = ["", ""] if line.interval is None else [f"{end:.2f}" for end in line.interval]
        inside = percent(line.inside / line.checked) if line.checked else ""
        table.add_row(line.run_class, str(line.fitted), *ends, str(line.checked), inside)
    head = Text(
        "\nIntervals of measured / predicted, fitted to one half of the models and checked on the other half", "bold"
    )
    return Lines(head, table)


def group_cells(group: ScoreGroup) -> list[str]:
    """Return the cells of one group."""
    time = (group.median_abs_error, group.p90_abs_error, group.bias)
    choice = (group.pair_accuracy, group.top1_regret, group.top3_regret)
    memory = (group.memory_median_abs_error, group.memory_mean_abs_error, group.memory_max_abs_error)
    bounds = (group.memory_bias, group.memory_covered)
    model = "experts" if group.sparse else "dense"
    names = [group.source, group.gpu, group.precision, model, str(group.rows), str(group.skipped)]
    shares = [*map(percent, (*time, *choice)), str(group.memory_rows or ""), *map(percent, (*memory, *bounds))]
    return [*names, *shares, out_of_memory_cell(group)]


def out_of_memory_cell(group: ScoreGroup) -> str:
    """Return "2 of 3, 1 false": runs out of memory that were predicted to be, and runs falsely predicted to be."""
    words = [f"{group.oom_found} of {group.oom_rows}"] if group.oom_rows else []
    words += [f"{group.oom_false} false"] if group.oom_false else []
    return ", ".join(words)


def percent(share: float | None) -> str:
    """Return a share as a percentage, empty for None."""
    return "" if share is None else f"{share:.1%}"


def markdown(validation: Validation, by: TableBy) -> str:
    """Return the scores as a Markdown table: time and memory by group, or step time by source or class of runs."""
    if by is TableBy.GROUP:
        return markdown_table(
            (*GROUP_COLUMNS, *SCORE_COLUMNS), [group_cells(group) for group in validation.groups if group.rows]
        )
    checking = by is TableBy.KIND
    head = (by.value, *SUMMARY_COLUMNS, *(CHECK_COLUMNS if checking else ()))
    return markdown_table(head, summaries(validation.rows, by, checking=checking))


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    first, *rest = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return "\n".join([first, "|---" * len(head) + "|", *rest])


def summaries(rows: Iterable[Predicted], by: TableBy, *, checking: bool) -> list[list[str]]:
    """Return step-time scores of each source or class, and of all runs.

    With `checking`, a row also has the scores of the models that no constant was fitted to.
    """
    groups: dict[str, list[Predicted]] = defaultdict(list)
    for p in rows:
        if p.time_error is not None:
            groups[p.run_class if by is TableBy.KIND else p.training_run.source].append(p)
    every = {"all": [p for some in groups.values() for p in some]} if groups else {}
    return [
        [name, *_summary(some), *(_summary([p for p in some if not in_fitting_half(p)]) if checking else ())]
        for name, some in (*sorted(groups.items()), *every.items())
    ]


def _summary(rows: Sequence[Predicted]) -> list[str]:
    if not rows:
        return ["0", *[""] * (len(SUMMARY_COLUMNS) - 1)]
    errors = [p.time_error or 0.0 for p in rows]
    sizes = [abs(error) for error in errors]
    shares = (median(sizes), mean(sizes), p90(sizes), mean(errors), mean(p.inside_interval for p in rows))
    return [str(len(rows)), *map(percent, shares)]


def validation_json(validation: Validation) -> dict[str, Any]:
    """Return scores and predictions as JSON values."""
    return {
        "groups": [asdict(group) for group in validation.groups],
        "intervals": [asdict(line) for line in coverage(validation.rows)],
        "rows": [
            {
                "id": p.training_run.id,
                "predicted_step_seconds": p.step_seconds,
                "predicted_step_seconds_low": p.interval[0],
                "predicted_step_seconds_high": p.interval[1],
                "measured_step_seconds": p.training_run.step_seconds,
                "predicted_memory_gib": p.memory_gib,
                "predicted_memory_gib_upper": p.memory_gib_upper,
                "measured_memory_gib": p.training_run.memory_gib,
                "predicted_out_of_memory": p.out_of_memory,
            }
            for p in validation.rows
        ],
        "skipped": [asdict(s) for s in validation.skipped],
    }
