"""A run as a web page: curves over steps, beside the predictions of its plan. One file, which loads nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from megaloom.dsl.errors import UserError
from megaloom.dsl.show.html import document
from megaloom.planner.contract.devices import GiB
from megaloom.planner.contract.plans import Plan
from megaloom.planner.report.charts import legend_html, table_html, tiles_html
from megaloom.planner.report.folded_table import text_table
from megaloom.planner.report.html import page_style
from megaloom.planner.report.line_chart import Curve, line_chart
from megaloom.planner.report.tables import layout_table
from megaloom.planner.report.units import peak_memory
from megaloom.runtime.data.synthetic import NOTE, SYNTHETIC
from megaloom.runtime.metrics.display import device_word, mfu_text, nbytes_text
from megaloom.runtime.metrics.metrics_file import METRICS_NAME, read_metrics
from megaloom.runtime.training.run_folder import file_of_run, plan_of_run

MEASURED, SECOND, PREDICTED = "var(--forward)", "var(--backward)", "var(--dim)"
Event = dict[str, Any]


def run_page(run: Path) -> str:
    """Return the page of a run folder. Raise UserError for a folder that is no run, or has no steps yet."""
    plan = plan_of_run(run)
    path = run / METRICS_NAME
    events = read_metrics(path)
    steps = [event for event in events if event.get("event") == "step"]
    if not steps:
        raise UserError(f"{path} has no steps yet\ntrain first: megaloom train {run}")
    title = run.resolve().name
    workload = f"{plan.workload} per step, in {plan.workload.precision}"
    subtitle = f"{plan.model} on {plan.cluster}; {workload}; {plan.layout}"
    file = file_of_run(run)
    if file and file.options.data.data == (SYNTHETIC,):
        subtitle += f"; {NOTE}"
    sections = "".join(_section(*each) for each in _charts(plan, events, steps))
    body = f"""<main>
<h1>{escape(title)}</h1>
<p>{escape(subtitle)}</p>
{_tiles(plan, events, steps)}
{table_html(layout_table(plan))}
<div class="columns">
{sections}</div>
</main>
"""
    return document(title, page_style(), body)


def _tiles(plan: Plan, events: Sequence[Event], steps: Sequence[Event]) -> str:
    """Return the last figures of the run in large."""
    last = steps[-1]
    evaluations = [event for event in events if event.get("event") == "evaluation"]
    figures = {"steps": f"{last['step']:,}", "loss": f"{last['loss']:.4f}" if last["loss"] is not None else "nan"}
    if evaluations and evaluations[-1].get("loss") is not None:
        figures["held-out loss"] = f"{evaluations[-1]['loss']:.4f}"
    if "mfu" in last:
        recent = steps[-20:]
        figures[f"tokens/s/{device_word(plan)}"] = f"{_mean(recent, 'tokens_per_second_per_device'):,.0f}"
        if any(event.get("mfu") is not None for event in recent):
            figures["MFU"] = f"{mfu_text(_mean(recent, 'mfu'))} (predicted {plan.predicted.mfu:.1%})"
        figures["peak memory"] = nbytes_text(max(event["peak_nbytes"] for event in steps if "peak_nbytes" in event))
    figures["skipped steps"] = f"{sum(bool(event.get('skipped')) for event in steps):,}"
    return tiles_html(text_table([*figures], [[*figures.values()]]))


def _mean(events: Sequence[Event], name: str) -> float:
    values = [event[name] for event in events if event.get(name) is not None]
    return sum(values) / len(values)


def _charts(plan: Plan, events: Sequence[Event], steps: Sequence[Event]) -> list[tuple[str, list[Curve]]]:
    """Return the title and the curves of each chart."""
    predicted, ends = plan.predicted, (float(steps[0]["step"]), float(steps[-1]["step"]))
    terms = sorted({name for event in steps for name in event.get("terms", {})})
    reported = sorted({name for event in events for name in event.get("report", {})})
    evaluations = [event for event in events if event.get("event") == "evaluation"]
    skipped, count = [], 0
    for event in steps:
        count += bool(event.get("skipped"))
        skipped.append((float(event["step"]), float(count)))

    def expected(value: float) -> Curve:
        return Curve("predicted", PREDICTED, tuple((x, value) for x in ends), dashed=True)

    def of(title: str, name: str, scale: float = 1.0, *more: Curve) -> tuple[str, list[Curve]]:
        return title, [_curve("measured" if more else title, steps, name, scale), *more]

    rate = expected(predicted.tokens_per_second_per_device)
    memory = expected(peak_memory(plan, "device" if device_word(plan) == "process" else "allocated") / GiB)
    return [
        ("loss", [_curve("training", steps, "loss"), _curve("held-out", evaluations, "loss", colour=SECOND)]),
        *((name, [_curve(name, [{**e, **e.get("terms", {})} for e in steps], name)]) for name in terms),
        *((f"{name}, reported", _reported(name, steps, evaluations)) for name in reported),
        of("learning rate", "lr"),
        of("gradient norm", "grad_norm"),
        of(f"tokens/s/{device_word(plan)}", "tokens_per_second_per_device", 1.0, rate),
        of("MFU, %", "mfu", 100.0, expected(100 * predicted.mfu)),
        of("step time, s", "seconds", 1.0, expected(predicted.step_seconds)),
        of("peak memory of the fullest rank, GiB", "peak_nbytes", 1 / GiB, memory),
        of("loss scale", "loss_scale"),
        ("skipped steps, in all", [Curve("skipped steps", MEASURED, tuple(skipped))]),
    ]


def _reported(name: str, steps: Sequence[Event], evaluations: Sequence[Event]) -> list[Curve]:
    """Return the curves of a name that steps of the user's own report."""
    training, held_out = (
        [{"step": e["step"], "x": e.get("report", {}).get(name)} for e in each] for each in (steps, evaluations)
    )
    return [_curve("training", training, "x"), _curve("held-out", held_out, "x", colour=SECOND)]


def _curve(title: str, events: Sequence[Event], name: str, scale: float = 1.0, colour: str = MEASURED) -> Curve:
    points = ((float(e["step"]), scale * e[name]) for e in events if e.get(name) is not None)
    return Curve(title, colour, tuple(points))


def _section(title: str, curves: list[Curve]) -> str:
    """Return a chart with its heading and legend; nothing if the run has not measured it."""
    drawn = [curve for curve in curves if curve.finite]
    if not drawn or all(curve.dashed for curve in drawn):
        return ""
    names = legend_html((curve.name, curve.colour) for curve in drawn) if len(drawn) > 1 else ""
    return f"<section><h2>{escape(title)}</h2>\n{names}{line_chart(drawn, title)}</section>\n"
