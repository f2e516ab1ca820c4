"""The report that `plan` and `megaloom explain` print.

`search_report` is for the result of a search, `plan_summary` for one plan. Both return rich renderables, which
`dsl.show.printing` prints.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megaloom.dsl.graph import Graph
from megaloom.planner.contract.plans import Plan

from .interval_sentences import interval_text, overflow_text
from .tables import (
    breakdown_table,
    layout_table,
    memory_table,
    next_best_table,
    prediction_table,
    rank_table,
    rejected_table,
)
from .units import memory_unit

if TYPE_CHECKING:
    from megaloom.planner.search.search import Found

RANKS_TITLE = "Pipeline ranks: milliseconds per micro-batch, parameters per device"
REJECTED_TITLE = "Similar layouts that break a rule or do not fit"


def search_report(result: Found, graph: Graph, top: int) -> RenderableType:
    """Return the best plan in full, a table of the next `top` - 1, and similar layouts that are not possible."""
    parts = [plan_summary(result.best, graph)]
    if others := result.next(top - 1):
        parts += [Text("\nNext best layouts", "bold"), next_best_table(result.best, others)]
    if result.rejected:
        parts += [Text(f"\n{REJECTED_TITLE}", "bold"), rejected_table(result)]
    return Group(*parts)


def plan_summary(plan: Plan, graph: Graph) -> RenderableType:
    """Return a plan's layout, prediction, reasons, step time by cause, pipeline ranks and memory."""
    return Group(
        layout_table(plan),
        Text(),
        prediction_table(plan),
        *(Text(f"\n{sentence}") for sentence in (interval_text(plan), overflow_text(plan)) if sentence),
        Text("\nWhy", "bold"),
        bullet_list(plan.reasons),
        Text(f"\n{breakdown_title(plan)}", "bold"),
        breakdown_table(plan),
        Text(f"\n{RANKS_TITLE}", "bold"),
        rank_table(plan, graph),
        Text(f"\nPeak memory of each pipeline rank, in {memory_unit(plan).name}", "bold"),
        memory_table(plan),
    )


def breakdown_title(plan: Plan) -> str:
    """Return the title above the step time by cause."""
    return "Time of one step" + (", on the slowest pipeline rank" if plan.layout.pp > 1 else "")


def bullet_list(sentences: Iterable[str]) -> Table:
    """Return the sentences below each other, each after a dash."""
    table = Table.grid(padding=(0, 1))
    for sentence in sentences:
        table.add_row("-", Text(sentence))
    return table
