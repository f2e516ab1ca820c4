"""No simulated schedule ends before its lower bounds, for any partition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaloom.planner.bounds import pipeline
from megaloom.planner.pipeline import schedules

Case = tuple[int, int, int, int, list[float], list[float], list[float]]


@st.composite
def pipelines(draw: st.DrawFn) -> Case:
    """(pp, vpp, micro-batches, group, seconds forward, backward, of what passes), uneven, even or mostly nothing."""
    pp = draw(st.integers(1, 7))
    vpp = draw(st.integers(1, 5)) if pp > 1 else 1
    m = draw(st.integers(pp if vpp > 1 else 1, 30))
    groups = [n for n in range(pp, min(m, 2 * pp) + 1) if not 0 < m % n < pp]
    if vpp > 1 and not groups:
        vpp = 1
    group = draw(st.sampled_from(groups)) if vpp > 1 else 0
    seconds = draw(st.sampled_from([st.floats(0.01, 10), st.floats(0.9, 1.1), st.sampled_from([0.01, 1.0, 5.0])]))
    each = [draw(st.lists(seconds, min_size=pp * vpp, max_size=pp * vpp)) for _ in range(2)]
    passing = draw(st.sampled_from([0.0, 0.05, 0.5]))
    return pp, vpp, m, group, *each, [passing] * (pp * vpp)


@given(pipelines())
def test_no_rank_ends_before_its_bound(case: Case) -> None:
    pp, _, m, group, *times = case
    ends = np.array(schedules.finish_times(*times, pp, m, group))
    assert (pipeline.finish_bounds(*times, pp, m, group) <= ends * (1 + 1e-12)).all()


@given(pipelines())
def test_no_cut_takes_less_than_its_share(case: Case) -> None:
    pp, vpp, m, group, forward, backward, passing = case
    share, passed = (float(x[0]) for x in pipeline.pass_multiples(*columns(pp, vpp, m, group or pp)))
    ends = schedules.finish_times(forward, backward, passing, pp, m, group)
    assert share * sum(forward + backward) + passed * passing[0] <= max(ends) * (1 + 1e-12)
    assert share >= m / pp * (1 - 1e-12)
    assert (passed > 0) == (vpp > 1)


@given(pipelines(), st.data())
def test_no_other_mean_says_more_of_any_cut(case: Case, data: st.DataObject) -> None:
    """The weights are the best there are: whatever others are given to what ranks wait for, some cut takes less."""
    pp, vpp, m, group, *_ = case
    if vpp == 1:
        return
    share, _ = pipeline.interleaved_multiples(pp, vpp, m, group or pp)
    each = st.lists(st.floats(0, 1), min_size=pp * vpp, max_size=pp * vpp)
    weights = np.array(data.draw(each.filter(lambda it: sum(it) > 0))).reshape(vpp, pp)
    weights /= weights.sum()
    first = np.zeros((vpp, pp))  # of a second on stage (k, r): in which waits it counts, by the definition in words
    for k in range(vpp):
        for r in range(pp):
            later = weights.ravel()[k * pp + r + 1 :].sum() - (group or pp) * weights[k + 1 :, r].sum()
            first[k, r] = m * weights[:, r].sum() + later
    assert first.min() <= share * (1 + 1e-9)


def test_the_bounds_know_bubbles() -> None:
    """The bounds are exact for equal stages; for any partition they include half of the bubble of 1F1B."""
    for pp, vpp, m in ((8, 1, 64), (8, 4, 64), (16, 2, 32)):
        even = [1 / (pp * vpp)] * (pp * vpp)
        exact = m / pp + (pp - 1) / (pp * vpp)
        assert np.isclose(pipeline.finish_bounds(even, [0.0] * len(even), [0.0] * len(even), pp, m).max(), exact)
        share = float(pipeline.pass_multiples(*columns(pp, vpp, m, pp))[0][0])
        assert vpp == 1 or 0.45 < (share - m / pp) / (exact - m / pp) < 0.6


def test_one_chunk_a_rank_waits_for_the_first_and_the_last_microbatch() -> None:
    pp, m = np.array([4.0]), np.array([8.0])
    passes = float(pipeline.pass_multiples(pp, np.array([1]), m, pp)[0][0])
    assert passes == pytest.approx(1 / (1 - (7 / 8) ** 4), rel=1e-12)


@given(pipelines())
def test_many_pipelines_at_once_end_as_each_does(one: Case) -> None:
    pp, _, m, group, *times = one
    more, sizes = 2 * m, [group, group or pp]
    several = [np.array([t, [2 * x for x in t]]) for t in times]
    ends = pipeline.finish_bounds(*several, pp, [m, more], sizes)
    assert (ends[0] == pipeline.finish_bounds(*times, pp, m, group)).all()
    assert (ends[1] == pipeline.finish_bounds(*(2 * np.array(t) for t in times), pp, more, group)).all()


def columns(pp: int, vpp: int, m: int, group: int) -> Any:
    return np.array([float(pp)]), np.array([vpp]), np.array([float(m)]), np.array([float(group)])
