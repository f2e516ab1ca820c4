"""Compare two plans: layouts and predictions side by side, and the differences in step time and memory.

`comparison` is the text for a terminal, `comparison_json` the JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10
from typing import Any

from attrs import evolve
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megaloom.planner.contract.plans import Plan
from megaloom.planner.search.reasons import cause_differences

from .folded_table import text_table
from .tables import layout_table, prediction_table
from .to_json import JSON_VERSION
from .units import Unit, memory_unit, time_unit

EQUAL_SHARE = 0.0005  # plans whose times per token differ by less are called equally fast


def comparison(a: Plan, b: Plan, names: Sequence[str]) -> RenderableType:
    """Return two plans side by side, with the differences of step time by cause and of peak memory by holder."""
    return Group(
        layout_table(a, b, names=names),
        Text(),
        prediction_table(a, b, names=names),
        Text(f"\n{_verdict(a, b, names)}"),
        Text("\nTime of one step, by cause", "bold"),
        _time_table(a, b, names),
        Text("\nPeak memory of the fullest pipeline rank", "bold"),
        _memory_table(a, b, names),
    )


def comparison_json(a: Plan, b: Plan, names: Sequence[str]) -> dict[str, Any]:
    """Return the step times of two plans and their differences by cause, second minus first, as JSON."""
    plans = zip(names, (a, b), strict=True)
    return {
        "version": JSON_VERSION,
        "plans": [
            {"plan": name, "step_seconds": p.predicted.step_seconds, "breakdown_seconds": p.predicted.breakdown}
            for name, p in plans
        ],
        "difference_seconds": b.predicted.step_seconds - a.predicted.step_seconds,
        "differences_seconds": cause_differences(a.predicted, b.predicted),
    }


def _verdict(a: Plan, b: Plan, names: Sequence[str]) -> str:
    """Return which plan is faster, by its time per token, and a note where the plans do different work."""
    one, two = a.predicted.step_seconds / a.workload.tokens, b.predicted.step_seconds / b.workload.tokens
    notes = "" if a.fingerprint == b.fingerprint else "The plans are for different models. "
    if a.workload.tokens != b.workload.tokens:
        notes += f"A step has {a.workload.tokens:,} tokens in {names[0]} and {b.workload.tokens:,} in {names[1]}. "
    if abs(two / one - 1) < EQUAL_SHARE:
        return f"{notes}Time per token is equal."
    fast, slow = (names[0], names[1]) if one < two else (names[1], names[0])
    return f"{notes}Time per token is {max(one, two) / min(one, two) - 1:.1%} longer in {slow} than in {fast}."


def _time_table(a: Plan, b: Plan, names: Sequence[str]) -> Table:
    more = b.predicted.step_seconds - a.predicted.step_seconds
    by_cause = cause_differences(a.predicted, b.predicted)
    causes = sorted(by_cause, key=lambda cause: -abs(by_cause[cause]))
    seconds = [[plan.predicted.breakdown.get(cause, 0.0) for cause in causes] for plan in (a, b)]
    return _sums([*causes, "total"], seconds, _unit_for(time_unit(a), more), names)


def _memory_table(a: Plan, b: Plan, names: Sequence[str]) -> Table:
    one, two = (max(p.predicted.nbytes, key=lambda rank: sum(rank.values())) for p in (a, b))
    holders = {**one, **two}
    nbytes = [[float(rank.get(holder, 0)) for holder in holders] for rank in (one, two)]
    return _sums([*holders, "total"], nbytes, memory_unit(a), names)


def _sums(titles: Sequence[str], values: Sequence[Sequence[float]], unit: Unit, names: Sequence[str]) -> Table:
    """Return the values of two plans and their differences; each column adds up, as printed, to its last row."""
    more = [y - x for x, y in zip(*values, strict=True)]
    first, second, third = ([*unit.parts(column), unit.of(sum(column))] for column in (*values, more))
    signed = ["+" * (not value.startswith("-")) + value for value in third]
    rows = zip(titles, first, second, signed, strict=True)
    return text_table([unit.name, *names, "difference"], [*rows], left=(unit.name,))


def _unit_for(unit: Unit, difference: float) -> Unit:
    """Return the unit with enough digits for a difference to 0.1 %, at most three more than it has."""
    digits = 3 - floor(log10(abs(difference) / unit.size)) if difference else 0
    return evolve(unit, digits=min(max(unit.digits, digits), unit.digits + 3))
