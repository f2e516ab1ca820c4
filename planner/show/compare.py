"""Two plans side by side: what each takes, and by which causes their steps differ.

Protocol: `differences` are the seconds by cause, which add up to the difference of the two steps; `compared` is that
for rich to print, `for_machines` for JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megaloom.planner.plan import Plan
from megaloom.planner.search import differ

from .explain import Unit, clock, fullest, layout_table, prediction_table, table, unit


def differences(a: Plan, b: Plan) -> dict[str, float]:
    """Seconds of a step that b takes more than a, by cause; negative where it takes less."""
    return differ.differences(a.predicted, b.predicted)


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
    time, plans = clock(a), (a.predicted, b.predicted)
    by_size = sorted(differences(a, b).items(), key=lambda item: -abs(item[1]))
    rows = [
        [cause, *(time.of(p.breakdown.get(cause, 0.0)) for p in plans), _signed(more, time)] for cause, more in by_size
    ]
    more = plans[1].step_seconds - plans[0].step_seconds
    rows.append(["a step", *(time.of(p.step_seconds) for p in plans), _signed(more, time)])
    return table([time.name, *names, "difference"], rows, left=(time.name,))


def _memory(a: Plan, b: Plan, names: Sequence[str]) -> Table:
    size = unit(a)
    one, two = (max(p.predicted.nbytes, key=lambda rank: sum(rank.values())) for p in (a, b))
    figures = {holder: (one.get(holder, 0), two.get(holder, 0)) for holder in {**one, **two}}
    figures["in all"] = fullest(a), fullest(b)
    rows = [[what, size.of(x), size.of(y), _signed(y - x, size)] for what, (x, y) in figures.items()]
    return table([size.name, *names, "difference"], rows, left=(size.name,))


def _signed(figure: float, unit: Unit) -> str:
    return ("+" if figure >= 0 else "") + unit.of(figure)
