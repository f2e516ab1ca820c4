"""One memory model: peak, feasibility, lower bound and timeline of drawn cases agree."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megaloom.dsl.graph import graph
from megaloom.examples.gpt2 import gpt
from megaloom.examples.llama3 import llama
from megaloom.examples.mixtral import mixtral
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.cost.memory import ALLOCATED, rank_memory
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.report.chrome_trace import end_of_step_slices
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.simulate.memory_timeline import memory_levels, memory_tracks

WORK = Workload(seq=64, batch=32)
MODELS = (
    llama("tiny-llama", layers=4, heads=8, kv_heads=4, embed=128, ff=256, vocab=512),
    gpt("tiny-gpt", layers=4, heads=4, embed=64, vocab=512, seq=64),
    mixtral("tiny-mixtral", layers=4, heads=8, kv_heads=4, embed=128, ff=256, experts=4, vocab=512),
)
ROUNDING = 8  # bytes: each holder is a whole number

sizes = st.floats(0, 1e12)
layouts = st.builds(
    lambda shape, micro, shard, recompute: Layout(**shape, micro_batch=micro, shard=shard, recompute=recompute),
    st.sampled_from([{"dp": 8}, {"dp": 4, "pp": 2}, {"dp": 2, "pp": 4}, {"dp": 4, "pp": 2, "vpp": 2}]),
    st.sampled_from([1, 2]),
    st.sampled_from(["none", "optimizer"]),
    st.sampled_from(["none", "selective", "full"]),
)


@given(sizes, st.lists(st.tuples(sizes, st.integers(0, 64)), min_size=1, max_size=4), sizes)
def test_numbers_and_arrays_have_one_memory(state: float, chunks: list[tuple[float, int]], transient: float) -> None:
    saved, in_flight = (np.array(column, dtype=float) for column in zip(*chunks, strict=True))
    total = float(saved @ in_flight)
    expected = state + ALLOCATED * (total + transient)
    assert np.isclose(rank_memory(state, total, 1, transient), expected, rtol=1e-12)
    assert np.isclose(rank_memory(state, saved[:, None], in_flight[None], transient), expected, rtol=1e-12).all()
    # It is linear: the memory of each term alone adds up.
    terms = rank_memory(state, 0, 0, 0) + rank_memory(0, total, 1, 0) + rank_memory(0, 0, 0, transient)
    assert np.isclose(terms, expected, rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(MODELS), layouts, st.floats(0.9, 1.1))
def test_peak_feasibility_bound_and_timeline_agree(model, layout: Layout, share: float) -> None:
    priced = Pricer(graph(model), cluster("8xH100"), WORK).price(layout)
    placed, x = priced.partition, layout
    peaks = placed.peaks
    assert [sum(nbytes.values()) for nbytes in priced.prediction.nbytes] == list(peaks)

    # The timeline reaches the peak of the prediction, and never exceeds it.
    for rank, track in enumerate(memory_tracks(priced)):
        levels = [
            n for _, n in memory_levels(track, priced.timeline.events[rank], end_of_step_slices(priced)[rank], x.pp)
        ]
        assert abs(max(levels) - peaks[rank]) <= ROUNDING

    # Feasible means that every peak is within the limit, in the arrays that a search uses too.
    limit = int(share * max(peaks))
    tight = Pricer(graph(model), cluster("8xH100"), WORK, headroom=1 - limit / cluster("8xH100").device.nbytes)
    again = tight.price(layout).partition
    assert again.fits == (max(again.peaks) <= tight.capacity)
    arrays = placed.problem.limits.rank_peaks(placed.problem.cut_points.searchsorted(placed.bounds)[None])[0]
    if not placed.problem.table.shared_elements:
        assert np.abs(arrays - peaks).max() <= ROUNDING + 1e-9 * max(peaks)

    # No partition needs less than the lower bound.
    assert tight.bound(layout)[1] <= max(peaks) + ROUNDING * x.pp * x.vpp + 1000
