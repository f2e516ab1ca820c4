"""Errors of runs that a fit has not seen, and the interval of a step that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from statistics import NormalDist

from megaloom.planner.cost.intervals import COVERAGE

from .fit import Fit, separated, solved
from .observed import Observed, lower_limits

# Before any run is seen, left-out errors have this standard deviation, which counts as so many runs. Chosen on one half
# of the groups of published runs; intervals from 4, 6, 10 and 20 runs of each of the others hold 89 to 94 % of its next
# ones (docs/accuracy/calibration.md).
USUAL_ERROR, USUAL_RUNS = 0.08, 4


def left_out(runs: Sequence[Observed], whole: Fit, groups: Sequence[object] = ()) -> list[float]:
    """Return predicted over measured seconds of each run, under the factors that all other runs give.

    whole: the fit of all runs. The factors of the others are found with its derivatives; the run itself is priced.
    groups: of each run, such as its model; then the factors are those that the runs of all other groups give.
    """
    out, groups = [], groups or range(len(runs))
    for run, group in zip(runs, groups, strict=True):
        rest = [n for n, other in enumerate(groups) if other != group]
        limits, kept = lower_limits([runs[n] for n in rest]), separated(whole.start.of(rest).shares)
        out.append(run.predicted(solved(whole.near.of(rest), limits, kept)) / run.seconds)
    return out


def interval_of(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the interval of measured over predicted that holds the next run nine times of ten.

    ratios: predicted over measured of runs that were left out. Their logarithms are taken as normal with mean 0 and a
    scaled inverse chi-squared prior of the variance: the next one has a Student t distribution.
    """
    freedom = USUAL_RUNS + len(ratios)
    variance = (USUAL_RUNS * USUAL_ERROR**2 + sum(log(ratio) ** 2 for ratio in ratios)) / freedom
    half = student_quantile((1 + COVERAGE) / 2, freedom) * sqrt(variance)
    return exp(-half), exp(half)


def student_quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t distribution (Abramowitz and Stegun, 26.7.5; 0.2 % off at 4 degrees)."""
    z, n = NormalDist().inv_cdf(probability), freedom
    terms = (
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
    )
    return z + sum(terms)
