"""Compare a measured step with its prediction: by kind of work, by pipeline rank and by layer.

`step_comparison` is the text for a terminal, `step_comparison_json` the JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from attrs import frozen
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megaloom.dsl.graph import Graph
from megaloom.planner.contract.plans import Plan
from megaloom.planner.report.folded_table import text_table
from megaloom.planner.report.to_json import JSON_VERSION
from megaloom.planner.report.units import Unit
from megaloom.planner.simulate.price import Priced

from .measured_step import MeasuredTrace, StepSeconds, seconds_of_plan, seconds_of_trace

MAX_ROWS = 12  # layers that are shown
MAX_RANKS = 16  # pipeline ranks that are shown


@frozen
class Difference:
    """Measured and predicted seconds of a part of a step."""

    name: str
    measured: float
    predicted: float

    @property
    def more(self) -> float:
        """Return by how much the measured time is longer."""
        return self.measured - self.predicted


def step_comparison(trace: MeasuredTrace, plan: Plan, priced: Priced, graph: Graph) -> RenderableType:
    """Return tables of a measured step beside its prediction."""
    measured, predicted = seconds_of_trace(trace), seconds_of_plan(plan, priced, graph)
    unit = Unit("s", 1.0, 3) if measured.step >= 1 else Unit("ms", 1e-3, 2)
    layers = by_layer(measured, predicted, priced, graph)
    shown = [Difference("step", measured.step, predicted.step), *by_kind(measured, predicted)]
    parts: list[RenderableType] = [
        Text(f"{plan.model} under {plan.layout}: step {trace.step} of {trace.path}, beside its prediction\n"),
        _table("kind of work", shown, unit),
        Text("\nMeans over pipeline ranks. Waiting includes sends, and in the measured step the gradient norm.\n"),
    ]
    if plan.layout.pp > 1:
        parts += [Text("Pipeline ranks", "bold"), _rank_table(measured, predicted, unit), Text()]
    parts += [Text(f"Layers, all micro-batches, forward and backward, in {unit.name}", "bold")]
    parts += [_table("layer", layers[:MAX_ROWS], unit)]
    if len(layers) > MAX_ROWS:
        parts += [Text(f"… and {len(layers) - MAX_ROWS} more with smaller differences")]
    return Group(*parts)


def step_comparison_json(trace: MeasuredTrace, plan: Plan, priced: Priced, graph: Graph) -> dict[str, Any]:
    """Return a measured step beside its prediction as JSON, in seconds."""
    measured, predicted = seconds_of_trace(trace), seconds_of_plan(plan, priced, graph)
    return {
        "version": JSON_VERSION,
        "step": trace.step,
        "measured_step_seconds": measured.step,
        "predicted_step_seconds": predicted.step,
        "kinds": [_row(each) for each in by_kind(measured, predicted)],
        "pipeline_ranks": [
            {"measured_seconds": dict(a), "predicted_seconds": dict(b)}
            for a, b in zip(measured.kinds, predicted.kinds, strict=True)
        ],
        "layers": [_row(each) for each in by_layer(measured, predicted, priced, graph)],
    }


def by_kind(measured: StepSeconds, predicted: StepSeconds) -> list[Difference]:
    """Return the kinds of work, the mean over pipeline ranks, largest difference first."""
    kinds = [
        Difference(kind, fmean(rank[kind] for rank in measured.kinds), fmean(rank[kind] for rank in predicted.kinds))
        for kind in measured.kinds[0]
    ]
    return _sorted([each for each in kinds if each.measured or each.predicted])


def by_layer(measured: StepSeconds, predicted: StepSeconds, priced: Priced, graph: Graph) -> list[Difference]:
    """Return the layers, equal ones as one row, largest difference first."""
    groups: dict[int, list[str]] = {}
    for node, kind in zip(graph.nodes, priced.partition.problem.job.structure.kind_of_node, strict=True):
        groups.setdefault(int(kind), []).append(node.name)
    rows = [
        Difference(_label(names), _sum(names, measured.nodes), _sum(names, predicted.nodes))
        for names in groups.values()
    ]
    return _sorted([each for each in rows if each.measured or each.predicted])


def _label(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} like it"


def _sum(names: Sequence[str], seconds: Mapping[str, float]) -> float:
    return sum(seconds.get(name, 0.0) for name in names)


def _sorted(rows: list[Difference]) -> list[Difference]:
    return sorted(rows, key=lambda each: -abs(each.more))


def _row(each: Difference) -> dict[str, Any]:
    return {"name": each.name, "measured_seconds": each.measured, "predicted_seconds": each.predicted}


def _table(title: str, rows: Sequence[Difference], unit: Unit) -> Table:
    """Return measured and predicted times, their difference, and their ratio."""
    cells = [
        [
            each.name,
            unit.of(each.measured),
            unit.of(each.predicted),
            f"{each.more / unit.size:+.{unit.digits}f}",
            f"{each.measured / each.predicted:.2f}" if each.predicted else "",
        ]
        for each in rows
    ]
    head = [title, f"measured {unit.name}", "predicted", "difference", "ratio"]
    return text_table(head, cells, left=(title,))


def _rank_table(measured: StepSeconds, predicted: StepSeconds, unit: Unit) -> Table:
    """Return measured and predicted times of each kind of work that takes any, one row for each pipeline rank."""
    both = [*measured.kinds, *predicted.kinds]
    kinds = [kind for kind in measured.kinds[0] if any(rank[kind] for rank in both)]
    rows = [
        [str(rank), *(f"{unit.of(a[kind])} ({unit.of(b[kind])})" for kind in kinds)]
        for rank, (a, b) in enumerate(zip(measured.kinds, predicted.kinds, strict=True))
    ]
    if len(rows) > MAX_RANKS:
        rows = [*rows[: MAX_RANKS - 1], ["…", *([""] * len(kinds))], rows[-1]]
    return text_table(["rank", *(f"{kind} {unit.name} (predicted)" for kind in kinds)], rows)
