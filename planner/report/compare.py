"""Two plans side by side: what each takes, and by which causes their steps differ.

Protocol: `differences` are the seconds by cause, which add up to the difference of the two steps; `compared` is that
for rich to print, `for_machines` for JSON.
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
from megaloom.planner.search import step_difference

from .text import (
    Unit,
    clock,
    layout_table,
    prediction_table,
    table,
    unit,
)


def differences(a: Plan, b: Plan) -> dict[str, float]:
    """Seconds of a step that b takes more than a, by cause; negative where it takes less."""
    return step_difference.cause_differences(a.predicted, b.predicted)


def compared(a: Plan, b: Plan, names: Sequence[str]) -> RenderableType:
    """Both plans, the difference of their steps by cause, and that of their fullest ranks' memory by holder."""
    return Group(
        layout_table(a, b, names=names),
        Text(),
        prediction_table(a, b, names=names),
        Text(f"\n{_verdict(a, b, names)}"),
        Text("\nWhere the difference comes from", "bold"),
        _times(a, b, names),
        Text("\nWhat the fullest pipeline rank of each holds", "bold"),
        _memory(a, b, names),
    )


def for_machines(a: Plan, b: Plan, names: Sequence[str]) -> dict[str, Any]:
    """The same as JSON."""
    plans = zip(names, (a, b), strict=True)
    return {
        "plans": [
            {"plan": name, "step_seconds": p.predicted.step_seconds, "breakdown_seconds": p.predicted.breakdown}
            for name, p in plans
        ],
        "difference_seconds": b.predicted.step_seconds - a.predicted.step_seconds,
        "differences_seconds": differences(a, b),
    }


def _verdict(a: Plan, b: Plan, names: Sequence[str]) -> str:
    one, two = a.predicted.step_seconds / a.workload.tokens, b.predicted.step_seconds / b.workload.tokens
    told = "" if a.fingerprint == b.fingerprint else "They are plans of different models. "
    if a.workload.tokens != b.workload.tokens:
        told += f"A step is {a.workload.tokens:,} tokens of the one and {b.workload.tokens:,} of the other. "
    if abs(two / one - 1) < 0.0005:
        return f"{told}A token takes as long in both."
    quick, slow = (names[0], names[1]) if one < two else (names[1], names[0])
    return f"{told}A token takes {max(one, two) / min(one, two) - 1:.1%} longer in {slow} than in {quick}."


def _times(a: Plan, b: Plan, names: Sequence[str]) -> Table:
    more = b.predicted.step_seconds - a.predicted.step_seconds
    by_size = dict(sorted(differences(a, b).items(), key=lambda item: -abs(item[1])))
    seconds = [[plan.predicted.breakdown.get(cause, 0.0) for cause in by_size] for plan in (a, b)]
    return _added([*by_size, "a step"], seconds, _telling(clock(a), more), names)


def _memory(a: Plan, b: Plan, names: Sequence[str]) -> Table:
    one, two = (max(p.predicted.nbytes, key=lambda rank: sum(rank.values())) for p in (a, b))
    held = {**one, **two}
    nbytes = [[float(rank.get(holder, 0)) for holder in held] for rank in (one, two)]
    return _added([*held, "in all"], nbytes, unit(a), names)


def _added(what: Sequence[str], figures: Sequence[Sequence[float]], unit: Unit, names: Sequence[str]) -> Table:
    """The figures of two plans and their differences: each column adds up to its last row, as it is printed."""
    more = [y - x for x, y in zip(*figures, strict=True)]
    first, second, third = ([*unit.parts(column), unit.of(sum(column))] for column in (*figures, more))
    signed = ["+" * (not figure.startswith("-")) + figure for figure in third]
    return table([unit.name, *names, "difference"], [*zip(what, first, second, signed, strict=True)], left=(unit.name,))


def _telling(unit: Unit, difference: float) -> Unit:
    """The unit with as many digits as it takes to say a difference to a thousandth, and three more at the most."""
    asked = 3 - floor(log10(abs(difference) / unit.size)) if difference else 0
    return evolve(unit, digits=min(max(unit.digits, asked), unit.digits + 3))
