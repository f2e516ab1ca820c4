"""Units in which reports show seconds, bytes and counts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise

from attrs import frozen

from megaloom.planner.contract.devices import GiB
from megaloom.planner.contract.plans import Plan
from megaloom.planner.search import reasons


@frozen
class Unit:
    """A unit with its size in seconds or bytes, and the number of digits after the point."""

    name: str
    size: float
    digits: int

    def of(self, value: float) -> str:
        """Return a value in this unit, without the unit's name."""
        return f"{value / self.size:.{self.digits}f}"

    def parts(self, values: Iterable[float]) -> list[str]:
        """Return the parts of a sum, each rounded up or down so that the printed parts add up to the printed sum."""
        sums = [0.0, *accumulate(values)]
        return [self.of(float(self.of(b)) * self.size - float(self.of(a)) * self.size) for a, b in pairwise(sums)]


def peak_memory(plan: Plan, kind: str = "device") -> int:
    """Return the bytes of the fullest pipeline rank, as `kind` counts them: see `cost.measured_memory.held_bytes`."""
    return reasons.peak_nbytes(plan.predicted, kind)


def memory_unit(plan: Plan) -> Unit:
    """Return the unit for the memory of a plan: GiB, or MiB below 1 GiB."""
    used = peak_memory(plan)
    return Unit("GiB", GiB, 1 if used >= 4 * GiB else 2) if used >= GiB else Unit("MiB", 2**20, 1)


def time_unit(plan: Plan) -> Unit:
    """Return the unit for the step time of a plan: seconds, or milliseconds below 1 s."""
    return Unit("s", 1.0, 3) if plan.predicted.step_seconds >= 1 else Unit("ms", 1e-3, 2)


def format_count(count: int) -> str:
    """Return a count in billions, millions or thousands with two digits after the point."""
    for size, name in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if count >= size:
            return f"{count / size:.2f}{name}"
    return str(count)
