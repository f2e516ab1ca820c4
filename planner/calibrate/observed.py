"""Measured runs, and their predicted steps near a point of all factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout

from .factors import FACTORS, scaled

Numbers = NDArray[np.float64]
STEP = 1.05  # factor by which a derivative is taken


@frozen(kw_only=True)
class Observed:
    """A measured run: its cluster without factors, measured seconds of a step, and predicted seconds on any cluster.

    memory: measured over predicted bytes of tensors on the fullest device, if they were measured.
    """

    name: str
    cluster: Cluster
    layout: Layout
    run_class: str
    seconds: float
    seconds_on: Callable[[Cluster], float]
    memory: float | None = None

    def predicted(self, at: Numbers) -> float:
        """Return the predicted seconds at these logarithms of all factors."""
        return self.seconds_on(scaled(self.cluster, np.exp(at).tolist()))


@frozen(eq=False)
class Linearized:
    """Predictions near a point: its log factors, log(predicted / measured) there, and the share of each factor.

    at: [factors]. residuals: [runs]. shares: [runs, factors], the derivatives of the logarithm of predicted seconds by
    the log factors: about the share of a step that a factor multiplies.
    """

    at: Numbers
    residuals: Numbers
    shares: Numbers

    def of(self, runs: Sequence[int]) -> Linearized:
        """Return the predictions of some of the runs, by their numbers."""
        return Linearized(self.at, self.residuals[list(runs)], self.shares[list(runs)])

    def moved(self, to: Numbers) -> Numbers:
        """Return log(predicted / measured) at other log factors, to first order: [runs]."""
        out: Numbers = self.residuals + self.shares @ (to - self.at)
        return out


def linearized(runs: Sequence[Observed], at: Numbers) -> Linearized:
    """Return the predictions of these runs near a point."""
    residuals, shares = [], []
    for run in runs:
        here = run.predicted(at)
        moved = (run.predicted(at + log(STEP) * axis) for axis in np.eye(len(FACTORS)))
        shares.append([log(seconds / here) / log(STEP) for seconds in moved])
        residuals.append(log(here / run.seconds))
    return Linearized(at, np.array(residuals), np.array(shares))


def lower_limits(runs: Sequence[Observed]) -> Numbers:
    """Return the logarithms of the least values of all factors that the clusters of these runs allow."""
    return np.array([max(log(factor.least(run.cluster)) for run in runs) for factor in FACTORS])
