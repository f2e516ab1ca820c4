"""Coverage of the intervals: fitted to one half of the models, checked on the other half.

`coverage(rows)` has a line for each class of runs. The SHA-256 of a model's name says to which half it belongs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from hashlib import sha256

from attrs import frozen

from megaloom.planner.cost.intervals import narrowest_interval

from .scoring import Predicted

CAMPAIGN_ROWS = 3  # fitted rows of one source, GPU, precision and model, so that no campaign outweighs others


@frozen
class Coverage:
    """One class of runs: its interval from the fitting half, and the rows of the checking half inside of it."""

    run_class: str
    fitted: int  # rows
    interval: tuple[float, float] | None  # measured / predicted
    checked: int  # rows
    inside: int  # rows of the checking half


def coverage(rows: Iterable[Predicted]) -> tuple[Coverage, ...]:
    """Return the interval and its coverage of each class of runs, then the coverage of all."""
    by: dict[str, list[Predicted]] = defaultdict(list)
    for p in rows:
        if p.training_run.step_seconds is not None:
            by[p.run_class].append(p)
    if not by:
        return ()
    lines = [_covered(run_class, members) for run_class, members in sorted(by.items())]
    fitted, checked, inside = (sum(x) for x in zip(*((x.fitted, x.checked, x.inside) for x in lines), strict=True))
    return (*lines, Coverage("all", fitted, None, checked, inside))


def _covered(run_class: str, rows: Sequence[Predicted]) -> Coverage:
    fitted, checked = _campaign_rows(p for p in rows if in_fitting_half(p)), [p for p in rows if not in_fitting_half(p)]
    ratios = [float(p.training_run.step_seconds or 0.0) / p.step_seconds for p in fitted]
    inside = sum(p.inside_interval for p in checked)
    interval = narrowest_interval(ratios) if ratios else None
    return Coverage(run_class, len(fitted), interval, len(checked), inside)


def in_fitting_half(p: Predicted) -> bool:
    """Return True if the model of a row belongs to the fitting half."""
    return sha256(p.training_run.name.encode()).digest()[-1] % 2 == 0


def _campaign_rows(rows: Iterable[Predicted]) -> list[Predicted]:
    seen: Counter[tuple[str, ...]] = Counter()
    out = []
    for p in rows:
        key = (p.training_run.source, p.training_run.gpu, str(p.training_run.workload.precision), p.training_run.name)
        seen[key] += 1
        out += [p] if seen[key] <= CAMPAIGN_ROWS else []
    return out
