"""Table of the recorded plans whose recommended layout is not the fastest: docs/accuracy/recommendations.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megaloom.planner.contract.layout import FIELDS, Layout
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.search.simple_first import contrast

from .golden import LAYOUT, OVERLAP, PLANS, read
from .golden_cases import CASES


def recommended_table() -> str:
    """Return the table, one row a search."""
    rows = list(_rows())
    head = "| search | fastest | recommended | slower | simpler |\n|---|---|---|---|---|\n"
    planned = sum(record["plan"] is not None for record in read(PLANS).values())
    return f"{len(rows)} of {planned} searches:\n\n{head}" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _rows() -> Iterator[tuple[str, ...]]:
    records = read(PLANS)
    for case in CASES:
        plan = records[case.name]["plan"]
        if plan is None or plan["recommended"]["layout"] is None:
            continue
        fastest, simple = _layout(plan["layout"]), _layout(plan["recommended"]["layout"])
        slower = plan["recommended"]["step_seconds"] / plan["step_seconds"] - 1
        words = contrast(simple, fastest, cluster(case.cluster)) or "less memory"
        yield case.name, f"`{fastest}`", f"`{simple}`", f"{slower:.1%}", words


def _layout(recorded: dict[str, Any]) -> Layout:
    """Return a recorded layout. What is derived, and what was recorded under another name, is left out."""
    fields = {LAYOUT[name]: value for name, value in recorded.items() if LAYOUT[name] in FIELDS}
    return Layout(**fields | {"overlaps": [OVERLAP[name] for name in recorded["overlap"]]})
