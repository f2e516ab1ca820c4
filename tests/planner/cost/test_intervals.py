"""The interval of a predicted step time: laws, and its coverage of published runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.accuracy.coverage import coverage, in_fitting_half
from benchmarks.accuracy.scoring import score
from megaloom.dsl.graph import graph
from megaloom.examples.llama3 import llama3_8b
from megaloom.examples.mixtral import mixtral_8x7b
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.cost.intervals import (
    COVERAGE,
    DENSE_WIDE,
    EXPERTS,
    OTHER_CLASS,
    SPREADS,
    interval,
    narrowest_interval,
    run_class,
)
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.hardware.presets import PRESETS
from megaloom.planner.search.pricing import price
from tests.support.published import sample_runs


@given(st.floats(1e-6, 1e6), st.sampled_from([*SPREADS, OTHER_CLASS]))
def test_an_interval_holds_its_prediction(seconds: float, of: str) -> None:
    low, high = interval(seconds, of)
    assert low < seconds < high
    widest = interval(seconds, OTHER_CLASS)
    assert widest[0] <= low and high <= widest[1]


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=99))
def test_a_spread_leaves_out_no_more_than_it_says(ratios: list[float]) -> None:
    low, high = narrowest_interval(ratios)
    outside = sum(not low <= x <= high for x in ratios)
    assert outside <= (1 - COVERAGE) * len(ratios)


def test_what_a_prediction_is_like() -> None:
    h100 = PRESETS["H100"].device
    assert run_class(False, Precision.BF16, h100) == DENSE_WIDE != run_class(False, Precision.FP8, h100)
    assert run_class(False, Precision.BF16, PRESETS["GB200"].device) == run_class(False, Precision.FP8, h100)
    assert run_class(True, Precision.BF16, h100) == EXPERTS
    assert run_class(False, Precision.FP32, PRESETS["CPU"].device) == OTHER_CLASS


@pytest.mark.parametrize(("model", "of"), [(llama3_8b, DENSE_WIDE), (mixtral_8x7b, EXPERTS)])
def test_a_layout_is_priced_with_its_interval(model, of) -> None:
    priced = price(graph(model()), Layout(dp=1, tp=8, pp=2), cluster("16xH100"), Workload(seq=4096, batch=16))
    assert priced.prediction.interval == interval(priced.seconds, of)


def test_intervals_hold_most_published_runs() -> None:
    validation = score(run for run in sample_runs().values() if run.source != "megatron-functional")
    lines = {line.run_class: line for line in coverage(validation.rows)}
    assert lines["all"].checked == sum(
        not in_fitting_half(p) and p.training_run.step_seconds is not None for p in validation.rows
    )
    assert lines["all"].inside >= 0.8 * lines["all"].checked
    ratios = lines[DENSE_WIDE].interval
    assert ratios is not None and ratios[0] < 1 < ratios[1]
