"""A calibration: the factors of measured runs, the errors before, after and left out, and what it says of plans."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from statistics import median

import numpy as np
from attrs import evolve, frozen

from megaloom.planner.contract.calibration import Calibration
from megaloom.planner.contract.devices import Cluster

from .factors import FACTORS, scaled
from .fit import PRIORS, SEPARATED, Fit, deviations, fit
from .held_out import interval_of, left_out
from .observed import Numbers, Observed


@frozen
class FactorEstimate:
    """A factor after a fit: its value, the standard deviation of its logarithm, and why it was not fitted, if so."""

    name: str
    value: float
    deviation: float
    reason: str = ""


@frozen(eq=False)
class CalibratedRuns:
    """Measured runs in the order of their names, with predicted over measured seconds of each.

    before: with all factors at 1. after: at the fitted factors. held_out: at the factors that all other runs give.
    """

    runs: tuple[Observed, ...]
    fit: Fit
    before: tuple[float, ...]
    after: tuple[float, ...]
    held_out: tuple[float, ...]

    @property
    def estimates(self) -> tuple[FactorEstimate, ...]:
        """Return all factors with their values, and the reasons of those that were not fitted."""
        shares, kept = self.fit.start.shares, self.fit.kept
        known = dict(zip(kept, deviations(shares, kept) * PRIORS[list(kept)], strict=True))
        return tuple(
            FactorEstimate(
                factor.name,
                exp(self.fit.near.at[j]),
                float(known.get(j, PRIORS[j])),
                "" if j in known else unseparated_reason(j, shares, kept, self.runs),
            )
            for j, factor in enumerate(FACTORS)
        )

    @property
    def calibration(self) -> Calibration:
        """Return what plans on this cluster take from the runs beside its figures."""
        memory = [run.memory for run in self.runs if run.memory]
        return Calibration(
            runs=len(self.runs),
            classes=tuple(sorted({run.run_class for run in self.runs})),
            step=_rounded_outwards(*interval_of(self.held_out)),
            memory_high=_memory_high(memory) if len(memory) > 1 else None,
        )

    def cluster(self, like: Cluster) -> Cluster:
        """Return a cluster with the fitted factors and this calibration."""
        return evolve(scaled(like, np.exp(self.fit.near.at).tolist()), calibration=self.calibration)


def calibrated(runs: Sequence[Observed]) -> CalibratedRuns:
    """Fit the factors that these runs separate. Their order does not matter."""
    ordered = tuple(sorted(runs, key=lambda run: run.name))
    whole = fit(ordered)
    return CalibratedRuns(
        runs=ordered,
        fit=whole,
        before=tuple(np.exp(whole.start.residuals).tolist()),
        after=tuple(np.exp(whole.near.residuals).tolist()),
        held_out=tuple(left_out(ordered, whole)),
    )


def unseparated_reason(j: int, shares: Numbers, kept: Sequence[int], runs: Sequence[Observed]) -> str:
    """Return why runs with these shares do not tell a factor.

    Either they hardly depend on it, so that it would stay unknown if all others were known; or it changes their steps
    as a fitted factor does: the one whose shares point into the most similar direction.
    """
    column, factor = shares[:, j], FACTORS[j]
    if not column.any():
        return "no step depends on it"
    if deviations(shares, [j])[0] > SEPARATED:
        low, high = column.min(), column.max()
        return f"the runs tell too little of it: it is {_span(low, high)} of a step"
    cosines = [abs(float(shares[:, k] @ column)) / np.linalg.norm(shares[:, k]) for k in kept]
    other = kept[int(np.argmax(cosines))]
    values = {axis: {getattr(run.layout, axis) for run in runs} for axis in factor.axes}
    named = ", ".join(f"{axis} {min(found)}" for axis, found in values.items() if len(found) == 1 and found != {1})
    return f"it cannot be told from {FACTORS[other].name}" + (f": all runs have {named}" if named else "")


def _span(low: float, high: float) -> str:
    first, last = f"{max(0.0, low):.1%}", f"{high:.1%}"
    return first if first == last else f"{first} to {last}"


def _memory_high(ratios: Sequence[float]) -> float:
    """Return the upper end of measured over predicted memory: the usual ratio of the runs, and the errors around it."""
    usual = median(ratios)
    return _rounded_outwards(1.0, usual * interval_of([ratio / usual for ratio in ratios])[1])[1]


def _rounded_outwards(low: float, high: float) -> tuple[float, float]:
    return float(np.floor(low * 1e3) / 1e3), float(np.ceil(high * 1e3) / 1e3)


def median_error(ratios: Sequence[float]) -> float:
    """Return the median size of predicted / measured - 1."""
    return median(abs(ratio - 1) for ratio in ratios)
