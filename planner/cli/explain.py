"""The command `megaloom explain`, which prints a plan, or compares two plans."""

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
    """Print a plan: layout, step time, memory and reasons. With two plans, print their differences by cause.

    Parameters
    ----------
    plan
        A plan.json.
    other
        Another plan.json, to compare with the first.
    as_json
        Print JSON only.
    html
        File for a web page of the first plan.
    trace
        File for a Chrome trace of its predicted step, for ui.perfetto.dev; compressed if its name ends in .gz.
    """
    from megaloom.dsl.files.outputs import check_output_file
    from megaloom.dsl.graph import graph
    from megaloom.dsl.show.printing import show
    from megaloom.planner.report.compare import comparison, comparison_json
    from megaloom.planner.report.text import plan_summary
    from megaloom.planner.report.to_json import plan_json

    check_output_file(html, "--html")
    check_output_file(trace, "--trace")
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
    """Return the plan in a file, and its model, which must not have changed since."""
    from megaloom.planner.contract.plan_json import load
    from megaloom.planner.contract.planned_model import planned_model
    from megaloom.planner.rules.plan_check import check_plan

    plan = load(name)
    model = planned_model(plan)
    check_plan(plan, model)
    return plan, model
