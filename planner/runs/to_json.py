"""A second opinion as JSON, under the name `from`. Times are in seconds, memory in GiB."""

from __future__ import annotations

from typing import Any

from attrs import asdict

from megaloom.dsl.facts.parameters import params
from megaloom.planner.contract.devices import GiB
from megaloom.planner.contract.plan_json import layout_to_json
from megaloom.planner.report.run_cost import cost_json, training_cost
from megaloom.planner.report.to_json import JSON_VERSION, plan_json
from megaloom.planner.report.token_budget import TokenBudget

from .memory_causes import memory_causes
from .opinion import Opinion
from .run import Measured, TrainingRun
from .text import edits_of


def opinion_json(opinion: Opinion, budget: TokenBudget | None = None) -> dict[str, Any]:
    """Return the opinion: what was read, rules broken, prediction, best layout, changes that matter, causes.

    With a budget `tokens` has the days and the money that its tokens take, with the run's layout and with the best.
    """
    run = opinion.run
    edits = edits_of(opinion, opinion.together)
    judged = {
        "predicted": None if opinion.plan is None else plan_json(opinion.plan),
        "fits": opinion.fits,
        "best": None if opinion.best is None else plan_json(opinion.best),
        "advised": None if opinion.advised is None else plan_json(opinion.advised),
        "gain": opinion.gain,
        "changes": [
            {"change": one.group, "alone": None if one.alone is None else plan_json(one.alone)}
            for one in opinion.changes
        ],
        "together": None if opinion.together is None else plan_json(opinion.together),
        "flags": [
            {
                "flag": edit.flag,
                "new": list(edit.new),
                "line": edit.old[-1].origin.line_number if edit.old else None,
                "path": edit.old[-1].origin.path if edit.old else None,
            }
            for edit in (() if isinstance(edits, str) else edits)
        ],
        "tokens": _long_runs(opinion, budget),
        "causes": [{"cause": cause.words, "seconds": cause.seconds} for cause in opinion.causes],
    }
    broken = [asdict(violation) for violation in opinion.broken]
    return {
        "version": JSON_VERSION,
        "from": {**_read(run), "gpus": str(opinion.cluster), "violations": broken, **judged},
    }


def _long_runs(opinion: Opinion, budget: TokenBudget | None) -> dict[str, Any] | None:
    if budget is None:
        return None
    plans = {"predicted": opinion.plan, "best": opinion.best}
    return {
        name: None if plan is None else cost_json(training_cost(plan, opinion.run.model, budget), budget)
        for name, plan in plans.items()
    }


def _read(run: TrainingRun) -> dict[str, Any]:
    return {
        "path": run.path,
        "program": run.program,
        "program_version": run.version,
        "defaults_of": run.defaults,
        "parameters": params(run.model),
        "layout": layout_to_json(run.layout),
        "workload": asdict(run.workload),
        "stated": [
            {
                "group": fact.group,
                "name": fact.name,
                "value": fact.value,
                "path": fact.origin.path if fact.origin else None,
                "line": fact.origin.line_number if fact.origin else None,
            }
            for fact in run.stated
        ],
        "assumed": [note.text for note in run.assumed],
        "left_out": [note.text for note in run.notes],
        "measured": None if run.measured is None else _measured(run, run.measured),
    }


def _measured(run: TrainingRun, measured: Measured) -> dict[str, Any]:
    return {
        "step_seconds": measured.seconds,
        "intervals": measured.iterations,
        "left_out": list(measured.left_out),
        "memory_gib": None if measured.nbytes is None else measured.nbytes / GiB,
        "memory_causes": list(memory_causes(run, measured)),
    }
