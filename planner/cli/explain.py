"""`megaloom explain`: a plan that was made before, shown again; or two, and why one is quicker."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from megaloom.dsl.graph import Model
    from megaloom.planner.contract.plans import Plan


def explain(
    plan: str,
    other: str | None = None,
    /,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    html: str | None = None,
    trace: str | None = None,
) -> None:
    """Show a plan again: its layout, its step, its memory, its reasons. Or two, and by which causes they differ.

    Parameters
    ----------
    plan
        A plan.json.
    other
        Another one, to be compared with the first.
    as_json
        Print JSON for machines and nothing else.
    html
        Where a page with pictures of the first plan is written.
    trace
        Where its predicted step is written as a trace for ui.perfetto.dev; compressed if the name ends in .gz.
    """
    from megaloom.dsl.graph import graph
    from megaloom.dsl.show.printing import show
    from megaloom.planner.report.compare import comparison, comparison_json
    from megaloom.planner.report.text import plan_summary
    from megaloom.planner.report.to_json import plan_json

    names = [plan] if other is None else [plan, other]
    (first, model), *rest = [_loaded(name) for name in names]
    if as_json:
        json.dump(comparison_json(first, rest[0][0], names) if rest else plan_json(first), sys.stdout, indent=1)
        print()
    elif rest:
        show(comparison(first, rest[0][0], names), sys.stdout)
    else:
        show(plan_summary(first, graph(model)), sys.stdout)
    if html or trace:
        from megaloom.planner.report.html import save_page_and_trace

        save_page_and_trace(first, model, html, trace)


def _loaded(name: str) -> tuple[Plan, Model]:
    """The plan in a file and its model, which must be there as it was planned."""
    from megaloom.dsl.catalog import find
    from megaloom.planner.contract.plans import load
    from megaloom.planner.rules.plan_check import check_plan

    plan = load(name)
    model, _ = find(plan.model)
    check_plan(plan, model)
    return plan, model
