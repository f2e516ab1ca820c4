"""Fit of factors to measured steps: least squares on log-ratios, with a prior towards 1.

Run i was measured to take m_i, and is predicted to take t_i(x) for the log factors x_j. With r_i = log(t_i / m_i),
weights w_i, noise s and priors p_j, the fit minimises

    sum_i w_i r_i(x)^2 / s^2 + sum_j x_j^2 / p_j^2

by Gauss-Newton steps. The weights make it robust: w_i = (d + 1) / (d + r_i^2 / s^2) is least squares under a Student
t distribution of d degrees of freedom (Lange, Little and Taylor, JASA 84, 1989), so that a run with a cause of its own
does not bend the factors.

With A the shares a_ij = d log t_i / d x_j, C = (A' A / s^2 + P^-2)^-1 is the covariance of x. It needs no measurement:
the design of the runs alone says which factors they separate. A factor is fitted if its standard deviation is at most
0.7 of its prior's; otherwise it stays at 1, and C is computed again without it. So of two factors with equal priors
whose shares are alike in all runs, one is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from .factors import FACTORS
from .observed import Linearized, Numbers, Observed, linearized, lower_limits

NOISE = 0.04  # s: of the groups of published runs, the median left-out error is 4 % (docs/accuracy/calibration.md)
FREEDOM = 4  # d, as Lange, Little and Taylor advise
SEPARATED = 0.7  # share of its prior's standard deviation that a fitted factor may have: the runs halve its variance
ROUNDS = 2  # Gauss-Newton steps; a third one changes factors by less than 0.1 %
REWEIGHTS = 20  # the weights have settled to 1e-6
PRIORS: Numbers = np.array([factor.prior for factor in FACTORS])


def deviations(shares: Numbers, kept: Sequence[int]) -> Numbers:
    """Return the standard deviations of some log factors, as shares of their priors', after runs with these shares."""
    prior = PRIORS[list(kept)]
    out: Numbers = np.sqrt(np.diag(_covariance(shares[:, list(kept)], prior))) / prior
    return out


def _covariance(shares: Numbers, priors: Numbers, weights: Numbers | float = 1.0) -> Numbers:
    """Return C for some factors. shares: [runs, factors]."""
    information = shares.T @ (np.reshape(weights, (-1, 1)) * shares) / NOISE**2
    return np.asarray(np.linalg.inv(information + np.diag(priors**-2.0)), dtype=np.float64)


def separated(shares: Numbers) -> list[int]:
    """Return the numbers of the factors that runs with these shares separate: the least known is left out in turn."""
    kept = list(range(len(FACTORS)))
    while kept:
        left = deviations(shares, kept).round(6)
        worst = len(kept) - 1 - int(np.argmax(left[::-1]))  # of two alike the later one
        if left[worst] <= SEPARATED:
            break
        del kept[worst]
    return kept


def solved(near: Linearized, least: Numbers, kept: Sequence[int]) -> Numbers:
    """Return the log factors that fit best near a point. least: the lower limits. Factors not kept are 0."""
    weights = np.ones(len(near.residuals), dtype=np.float64)
    for _ in range(REWEIGHTS):
        found = _within_limits(near, weights, least, kept)
        weights = ((FREEDOM + 1) / (FREEDOM + (near.moved(found) / NOISE) ** 2)).astype(np.float64)
    return found


def _within_limits(near: Linearized, weights: Numbers, least: Numbers, kept: Sequence[int]) -> Numbers:
    """Return the best log factors under these weights.

    A factor below its limit is set to the limit, and the others are fitted again.
    """
    fixed, free = np.zeros(len(FACTORS)), list(kept)
    while True:
        out, shares = fixed.copy(), near.shares[:, free]
        out[free] = -_covariance(shares, PRIORS[free], weights) @ (shares.T @ (weights * near.moved(fixed))) / NOISE**2
        below = [j for j in free if out[j] < least[j]]
        if not below:
            return out
        fixed[below] = least[below]
        free = [j for j in free if j not in below]


@frozen(eq=False)
class Fit:
    """Predictions at factors of 1, predictions near the best factors, and the numbers of the fitted factors."""

    start: Linearized
    near: Linearized
    kept: tuple[int, ...]


def fit(runs: Sequence[Observed]) -> Fit:
    """Fit the factors that these runs separate."""
    least, start = lower_limits(runs), linearized(runs, np.zeros(len(FACTORS)))
    kept, near = separated(start.shares), start
    for _ in range(ROUNDS):
        near = linearized(runs, solved(near, least, kept))
    return Fit(start, near, tuple(kept))
