"""Laws of the fit: known factors are recovered, those that runs do not separate stay at 1, order does not matter."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, log1p
from random import Random
from statistics import NormalDist

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from megaloom.planner.calibrate.calibrated import CalibratedRuns, calibrated
from megaloom.planner.calibrate.factors import FACTORS, scaled
from megaloom.planner.calibrate.fit import FREEDOM, NOISE, SEPARATED, deviations, fit, separated
from megaloom.planner.calibrate.held_out import interval_of, left_out, student_quantile
from megaloom.planner.calibrate.observed import Observed, linearized
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.hardware.cluster_names import cluster

BASE = cluster("64xH100")
ONES = (1.0, 1.0, 1.0, 1.0)
PRODUCTS, WITHIN, BETWEEN, HOST = range(4)
Parts = tuple[float, float, float, float, float]


def factors_of(machine: Cluster) -> tuple[float, float, float, float]:
    """Return the factors by which a cluster was scaled from BASE."""
    return (
        BASE.device.flops_efficiency / machine.device.flops_efficiency,
        BASE.intra.efficiency / machine.intra.efficiency,
        BASE.inter.efficiency / machine.inter.efficiency,
        machine.device.launch_seconds / BASE.device.launch_seconds,
    )


def run_of(name: str, parts: Parts, truth: Sequence[float] = ONES) -> Observed:
    """Return a run whose step is the sum of these seconds, each times its factor, the last one alone."""

    def seconds_on(machine: Cluster) -> float:
        return parts[4] + sum(part * factor for part, factor in zip(parts, factors_of(machine), strict=False))

    return Observed(
        name=name,
        cluster=BASE,
        layout=Layout(dp=8, tp=8),
        run_class="dense, 16 bits, before Blackwell",
        seconds=seconds_on(scaled(BASE, truth)),
        seconds_on=seconds_on,
    )


def estimates(found: CalibratedRuns) -> list[float]:
    return [one.value for one in found.estimates]


part = st.sampled_from([0.0, 0.1, 0.3, 0.6])
steps = st.tuples(st.floats(0.2, 1.0), part, part, part, st.floats(0.05, 0.4))
truths = st.tuples(st.floats(0.9, 1.3), st.floats(0.8, 1.8), st.floats(0.95, 2.0), st.floats(0.7, 1.8))


def objective(runs: Sequence[Observed], at: Sequence[float]) -> float:
    """Return what the fit minimises at these log factors: weighted squares of log-ratios, and the prior."""
    residuals = [log(run.predicted(np.array(at)) / run.seconds) / NOISE for run in runs]
    robust = sum((FREEDOM + 1) * log1p(residual**2 / FREEDOM) for residual in residuals)
    return robust + sum((x / factor.prior) ** 2 for x, factor in zip(at, FACTORS, strict=True))


@settings(deadline=None, max_examples=60)
@given(st.lists(steps, min_size=2, max_size=12), truths)
def test_no_true_factors_fit_better_and_others_stay_at_one(parts: list[Parts], truth: Sequence[float]) -> None:
    names = [f"{n:02}.log" for n in range(len(parts))]
    kept = separated(linearized([run_of(*pair) for pair in zip(names, parts, strict=True)], np.zeros(4)).shares)
    actual = [value if j in kept else 1.0 for j, value in enumerate(truth)]
    runs = [run_of(name, each, actual) for name, each in zip(names, parts, strict=True)]
    found = calibrated(runs)
    assert [j for j, one in enumerate(found.estimates) if not one.reason] == kept == list(found.fit.kept)
    assert all(one.value == 1.0 for one in found.estimates if one.reason)
    at, due = [log(value) for value in estimates(found)], [log(value) for value in actual]
    assert objective(runs, at) <= 1.03 * objective(runs, due) + 0.05


@settings(deadline=None, max_examples=15)
@given(truths, st.integers(0, 99))
def test_known_factors_are_recovered(truth: Sequence[float], seed: int) -> None:
    draw = Random(seed)
    runs = [run_of(f"{n}", tuple(draw.uniform(0.05, 1) for _ in range(5)), truth) for n in range(120)]  # type: ignore[arg-type]
    assert estimates(calibrated(runs)) == pytest.approx(truth, rel=0.05)


@settings(deadline=None, max_examples=30)
@given(st.lists(steps, min_size=2, max_size=8), truths, st.randoms(use_true_random=False))
def test_the_order_of_runs_does_not_matter(parts: list[Parts], truth: Sequence[float], random: Random) -> None:
    runs = [run_of(f"{n}.log", each, truth) for n, each in enumerate(parts)]
    mixed = runs.copy()
    random.shuffle(mixed)
    first, second = calibrated(runs), calibrated(mixed)
    assert [run.name for run in first.runs] == [run.name for run in second.runs]
    assert estimates(first) == estimates(second) and first.held_out == second.held_out


def test_factors_with_alike_shares_are_not_separated() -> None:
    alike = [run_of(f"{n}", (size, 0.25 * size, 0.25 * size, 0.0, 0.1 * size), (1, 1.5, 1.5, 1)) for n, size in
             enumerate((1.0, 2.0, 5.0, 7.0, 9.0, 11.0), 1)]  # fmt: skip
    found = calibrated(alike)
    assert found.fit.kept == (PRODUCTS,)
    assert found.estimates[WITHIN].value == found.estimates[BETWEEN].value == 1.0
    assert found.estimates[WITHIN].reason.endswith("all runs have tp 8")
    assert found.estimates[BETWEEN].reason == "it cannot be told from matrix products and attention: all runs have dp 8"
    assert found.estimates[HOST].reason == "no step depends on it"


def test_a_factor_that_hardly_matters_is_named_with_its_share() -> None:
    found = calibrated([run_of(f"{n}", (1.0, 0.0, 0.0, 0.01 * n, 0.0)) for n in range(1, 4)])
    assert found.estimates[HOST].reason == "the runs tell too little of it: it is 1.0% to 3.0% of a step"
    assert found.estimates[HOST].value == 1.0


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.floats(0, 0.6), min_size=4, max_size=4), min_size=1, max_size=9))
def test_separated_factors_are_known_and_more_runs_never_unlearn(rows: list[list[float]]) -> None:
    shares = np.array(rows)
    kept = separated(shares)
    assert not kept or max(deviations(shares, kept)) <= SEPARATED + 1e-6
    every = range(len(FACTORS))
    more = deviations(np.vstack([shares, np.full((1, 4), 0.2)]), every)
    assert (more <= deviations(shares, every) + 1e-9).all()


def test_a_run_with_a_cause_of_its_own_does_not_bend_the_factors() -> None:
    draw = Random(5)
    parts: list[Parts] = [(1.0, draw.uniform(0, 0.5), draw.uniform(0, 0.5), 0.0, 0.1) for _ in range(10)]
    runs = [run_of(f"{n}", each, (1.1, 1.4, 1.2, 1.0)) for n, each in enumerate(parts)]
    slow = [evolve(runs[0], seconds=3 * runs[0].seconds), *runs[1:]]
    assert estimates(calibrated(slow)) == pytest.approx(estimates(calibrated(runs)), rel=0.04)


def test_left_out_errors_are_those_of_fits_without_the_run() -> None:
    draw = Random(7)
    parts: list[Parts] = [(1.0, draw.uniform(0, 0.5), draw.uniform(0, 0.5), 0.0, 0.2) for _ in range(6)]
    runs = [run_of(f"{n}", each, (1.1, 1.5, 1.1, 1.0)) for n, each in enumerate(parts)]
    noisy = [evolve(run, seconds=run.seconds * exp(draw.gauss(0, 0.05))) for run in runs]
    quick = left_out(noisy, fit(noisy))
    for n, run in enumerate(noisy):
        near = fit([*noisy[:n], *noisy[n + 1 :]]).near
        assert run.predicted(near.at) / run.seconds == pytest.approx(quick[n], rel=0.015)
    grouped = left_out(noisy, fit(noisy), ("a", "a", "b", "b", "c", "c"))
    near = fit(noisy[2:]).near
    assert noisy[0].predicted(near.at) / noisy[0].seconds == pytest.approx(grouped[0], rel=0.01)


def test_factors_stay_within_what_efficiencies_allow() -> None:
    slow = [run_of(f"{n}", (0.3, 0.1, 0.5 + 0.01 * n, 0.0, 0.0)) for n in range(8)]
    found = calibrated([evolve(run, seconds=0.7 * run.seconds) for run in slow])
    machine = found.cluster(BASE)
    assert machine.inter.efficiency == pytest.approx(1.0) and machine.inter.efficiency <= 1.0


@pytest.mark.parametrize(("freedom", "due"), [(5, 2.0150), (6, 1.9432), (10, 1.8125), (30, 1.6973)])
def test_quantiles_of_student(freedom: int, due: float) -> None:
    assert student_quantile(0.95, freedom) == pytest.approx(due, rel=2e-3)


def test_the_interval_is_wide_for_few_runs_and_follows_their_errors() -> None:
    low, high = interval_of([1.0, 1.0])
    assert low == pytest.approx(1 / high) and 1.1 < high < 1.2
    assert interval_of([1.0] * 20)[1] < high < interval_of([0.8, 1.2])[1]
    draw = Random(1)
    many = [exp(draw.gauss(0, 0.1)) for _ in range(4000)]
    assert interval_of(many)[1] == pytest.approx(exp(0.1 * NormalDist().inv_cdf(0.95)), rel=0.01)


def test_memory_has_an_upper_end_if_two_runs_report_it() -> None:
    runs = [run_of(f"{n}", (1.0, 0.1 * n, 0.0, 0.0, 0.0)) for n in range(4)]
    assert calibrated(runs).calibration.memory_high is None
    assert calibrated([evolve(runs[0], memory=1.1), *runs[1:]]).calibration.memory_high is None
    measured = [evolve(run, memory=1.10) for run in runs]
    high = calibrated(measured).calibration.memory_high
    assert high is not None and 1.10 < high < 1.30
