"""Whether the intervals of predictions hold what was measured: made of one half of the models, checked on the other.

Protocol: `coverage(rows)` is a line for each kind of run. A model is of the half that its name's SHA-256 says.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from hashlib import sha256

from attrs import frozen

from megaloom.planner.simulate.intervals import narrowest_interval

from .scoring import Predicted

EACH = 3  # rows of one source, GPU, precision and model that a spread is made of, so that no campaign outweighs others


@frozen
class Covered:
    """A kind of runs: its spread by the fitting half, if it has one, and how much of the checking half that holds."""

    kind: str
    fitted: int  # rows
    interval: tuple[float, float] | None  # of measured / predicted
    checked: int
    held: int


def coverage(rows: Iterable[Predicted]) -> tuple[Covered, ...]:
    """A line for each kind, and one for all, if there are any."""
    by: dict[str, list[Predicted]] = defaultdict(list)
    for p in rows:
        if p.run.step_seconds is not None:
            by[p.kind].append(p)
    if not by:
        return ()
    lines = [_covered(kind, found) for kind, found in sorted(by.items())]
    fitted, checked, held = (sum(x) for x in zip(*((x.fitted, x.checked, x.held) for x in lines), strict=True))
    return (*lines, Covered("all", fitted, None, checked, held))


def _covered(kind: str, rows: Sequence[Predicted]) -> Covered:
    fitted, checked = _few(p for p in rows if fits(p)), [p for p in rows if not fits(p)]
    ratios = [float(p.run.step_seconds or 0.0) / p.step_seconds for p in fitted]
    held = sum(p.held for p in checked)
    return Covered(kind, len(fitted), narrowest_interval(ratios) if ratios else None, len(checked), held)


def fits(p: Predicted) -> bool:
    """Whether a row's model is of the fitting half."""
    return sha256(p.run.name.encode()).digest()[-1] % 2 == 0


def _few(rows: Iterable[Predicted]) -> list[Predicted]:
    seen: Counter[tuple[str, ...]] = Counter()
    out = []
    for p in rows:
        key = (p.run.source, p.run.gpu, str(p.run.workload.precision), p.run.name)
        seen[key] += 1
        out += [p] if seen[key] <= EACH else []
    return out
