"""The command `megaloom compare`, which compares a measured step with its prediction."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

TRACES = "trace-step-*.json.gz"
"""Traces in a run folder; the names are `runtime.metrics.trace_file.trace_path`'s."""


def compare(
    plan: Path,
    trace: Path | None = None,
    /,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Compare the measured step of a run, which `megaloom train --profile` writes, with the predicted one.

    Parameters
    ----------
    plan
        The folder of a run, or a plan.json.
    trace
        The trace of a step. [default: the last one in the folder]
    as_json
        Print JSON only.
    """
    from attrs import evolve

    from megaloom.dsl.graph import graph
    from megaloom.dsl.show.printing import show
    from megaloom.planner.contract.plan_json import load
    from megaloom.planner.contract.planned_model import planned_model
    from megaloom.planner.report.chrome_trace import replay
    from megaloom.planner.report.measured.measured_step import check_same_model, read_trace
    from megaloom.planner.report.measured.step_comparison import step_comparison, step_comparison_json
    from megaloom.planner.rules.plan_check import check_plan

    path, folder = (plan / "plan.json", plan) if plan.is_dir() else (plan, plan.parent)
    loaded = load(path)
    measured = read_trace(_last_trace(folder) if trace is None else trace)
    check_same_model(measured, loaded, str(path))
    has_model = (folder / "model.json").is_file()
    model = planned_model(evolve(loaded, model=str(folder / "model.json")) if has_model else loaded)
    check_plan(loaded, model)
    g = graph(model)
    priced = replay(loaded, g)
    if as_json:
        json.dump(step_comparison_json(measured, loaded, priced, g), sys.stdout, indent=1)
        print()
    else:
        show(step_comparison(measured, loaded, priced, g), sys.stdout)


def _last_trace(folder: Path) -> Path:
    from megaloom.dsl.errors import UserError

    traces = sorted(folder.glob(TRACES))
    if not traces:
        raise UserError(f"{folder} has no trace of a step\nwrite one: megaloom train {folder} --profile STEP")
    return traces[-1]
