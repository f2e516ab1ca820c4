"""Cuts of several chunks a rank, which share its room: compared with every way to cut, and with replays."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from megaloom.dsl.graph import graph
from megaloom.examples.deepseek import deepseek_v3
from megaloom.examples.llama3 import llama3_8b, llama3_70b
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.cost.cost_table import BACKWARD_COLUMNS, FORWARD_COLUMNS
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.partition import local_search
from megaloom.planner.partition.dynamic_program import evenest, within
from megaloom.planner.partition.memory_limit import MemoryLimit
from megaloom.planner.partition.partitioner import Partition
from megaloom.planner.partition.segments import Indices, SegmentSums
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.simulate import schedule

Case = tuple[SegmentSums, MemoryLimit]


@st.composite
def cases(draw: st.DrawFn, several: bool = True) -> Case:
    """Atoms that take time, have a state and save something; ranks with several chunks or one, and little room."""
    ranks, chunks = draw(st.integers(1, 3)), draw(st.integers(2, 3)) if several else 1
    size = draw(st.integers(ranks * chunks, 9))
    seconds, state, saved = (
        SegmentSums.of(np.array(draw(st.lists(st.integers(1, 9), min_size=size, max_size=size)), dtype=float))
        for _ in "tws"
    )
    flights = schedule.in_flight_table(ranks, chunks, 2 * ranks).astype(float)
    comes = np.array([[float(draw(st.integers(0, 5)))] * flights.shape[1] for _ in range(ranks)])
    received = np.array([0.0, *draw(st.lists(st.sampled_from([1.0, 1.0, 2.0]), min_size=size, max_size=size))])
    passed = draw(st.sampled_from([0.0, 3.0])) * np.maximum(1, received)
    stepping = state.times(draw(st.sampled_from([1.0, 1.5, 3.0])))
    rooms = MemoryLimit(state, stepping, saved, flights, comes, received, passed, beside=1.0, room=1.0)
    even = evenest(seconds, ranks * chunks)
    assert even is not None
    most = rooms.needed(np.array(even)[None]).max()  # with less room than this, another cut must do
    return seconds, evolve(rooms, room=float(most) * draw(st.integers(60, 105)) / 100)


def ways(runs: SegmentSums, rooms: MemoryLimit) -> Indices:
    count, size = rooms.ranks * rooms.chunks, len(runs)
    return np.array([(0, *inner, size) for inner in combinations(range(1, size), count - 1)])


def slowest(runs: SegmentSums, cuts: Indices) -> list[float]:
    seconds: list[float] = runs(cuts[:, :-1], cuts[:, 1:]).max(axis=1).tolist()
    return seconds


def needed(rooms: MemoryLimit, cut: Indices, rank: int) -> float:
    """The bytes of a rank, chunk by chunk and moment by moment."""
    mine = [(int(cut[s]), int(cut[s + 1]), s // rooms.ranks) for s in range(rank, len(cut) - 1, rooms.ranks)]

    def held(of: SegmentSums, a: int, b: int) -> float:
        return float(of.sums[b] - of.sums[a])

    moments = [
        sum(held(rooms.state, a, b) + n[c] * (held(rooms.saved, a, b) + rooms.received[a]) for a, b, c in mine) + comes
        for n, comes in zip(rooms.flights[rank], rooms.comes[rank], strict=True)
    ]
    return (
        rooms.beside
        + max(rooms.passed[a] for a, *_ in mine)
        + max(*moments, sum(held(rooms.stepping, a, b) for a, b, _ in mine))
    )


@given(cases())
def test_the_cut_with_room_is_the_quickest_of_all(case: Case) -> None:
    runs, rooms = case
    every = ways(runs, rooms)
    roomy = [all(needed(rooms, cut, r) <= rooms.room + 1e-9 for r in range(rooms.ranks)) for cut in every]
    assert roomy == (rooms.lacks(every) <= 0).tolist()
    even = evenest(runs, rooms.ranks * rooms.chunks)
    assert even is not None
    found = local_search.partition_within_limit(runs, np.array(even), rooms)
    cap = local_search.SLOWEST_FACTOR * min(slowest(runs, every)) * (1 + 1e-9)
    count = [t for t, fits in zip(slowest(runs, every), roomy, strict=True) if fits and t <= cap]
    assert (found is None) == (not count)
    if found is not None:
        best = min(count)
        assert math.isclose(slowest(runs, found[None])[0], best, rel_tol=1e-9)
        assert rooms.lacks(found[None])[0] <= 0


@given(cases(several=False))
def test_the_only_stages_of_ranks_are_the_quickest_with_room(case: Case) -> None:
    runs, rooms = case
    every = ways(runs, rooms)
    roomy = every[rooms.lacks(every) <= 0]
    found = evenest(runs, rooms.ranks, rooms.latest)
    assert (found is None) == (not len(roomy))
    if found is not None:
        assert rooms.enough
        assert tuple(found) in {tuple(way) for way in roomy.tolist()}
        assert math.isclose(slowest(runs, np.array(found)[None])[0], min(slowest(runs, roomy)), rel_tol=1e-9)


@given(cases(), st.floats(1, 40))
def test_what_is_hopeless_has_no_room(case: Case, seconds: float) -> None:
    runs, rooms = case
    every = ways(runs, rooms)
    quick = [t <= seconds for t in slowest(runs, every)]
    if rooms.hopeless(runs, seconds):
        assert not (np.array(quick) & (rooms.lacks(every) <= 0)).any()


@given(cases())
def test_shifts_leave_room_and_find_it_where_equal_shares_do(case: Case) -> None:
    """Of longer cuts not every way is looked at."""
    runs, rooms = case
    even = evenest(runs, rooms.ranks * rooms.chunks)
    assert even is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_search, "WAYS", 0)
        found = local_search.partition_within_limit(runs, np.array(even), rooms)
    near, cap = rooms.near(np.array(even)), local_search.SLOWEST_FACTOR * slowest(runs, np.array(even)[None])[0]
    shared = within(runs, near.shared, cap)
    fits = shared is not None and rooms.lacks(np.array(shared)[None])[0] <= 0
    assert found is not None or not fits
    if found is not None:
        assert rooms.lacks(found[None])[0] <= 0
        assert slowest(runs, found[None])[0] <= cap * (1 + 1e-9)
        assert slowest(runs, found[None])[0] >= slowest(runs, np.array(even)[None])[0] - 1e-9


@given(cases())
def test_levelled_chunks_are_no_slower_and_keep_their_room(case: Case) -> None:
    runs, rooms = case
    even = evenest(runs, rooms.ranks * rooms.chunks)
    assert even is not None
    start = np.array(even)
    before = level(start, case)
    found = local_search.level_ranks(runs, start, rooms.ranks)
    assert slowest(runs, found[None])[0] <= slowest(runs, start[None])[0] * (1 + 1e-9)
    assert level(found, case) <= before * (1 + 1e-9)
    if rooms.lacks(start[None])[0] <= 0:
        roomy = local_search.level_within_limit(runs, start, rooms)
        assert rooms.lacks(roomy[None])[0] <= 0
        assert slowest(runs, roomy[None])[0] <= slowest(runs, start[None])[0] * (1 + 1e-9)
        assert level(roomy, case) <= before * (1 + 1e-9)


def level(cut: Indices, case: Case) -> float:
    """What shifts make less, of one cut."""
    runs, rooms = case
    seconds = runs(cut[:-1], cut[1:])
    return float(local_search.step_score(seconds.reshape(1, rooms.chunks, rooms.ranks), seconds.max())[0])


CASES = [(llama3_70b, 8, 5), (llama3_70b, 8, 4), (llama3_70b, 4, 10), (deepseek_v3, 16, 2), (deepseek_v3, 8, 3)]


def replayed(placed: Partition) -> float:
    x, m = placed.layout, placed.problem.microbatches
    forward, backward = (placed.sums[:, way].sum(axis=1).tolist() for way in (FORWARD_COLUMNS, BACKWARD_COLUMNS))
    return schedule.replay(forward, backward, [0.0] * (len(forward) - 1), x.pp, m, x.microbatch_group).makespan


def test_what_shifts_level_takes_less_when_replayed() -> None:
    """No slowest chunk is slower, and schedules end sooner than those of the least sum of squares."""
    ratios = []
    for written, pp, vpp in CASES:
        layout = Layout(pp=pp, vpp=vpp, dp=8, ep=1 if written is llama3_70b else 8)
        work = Workload(seq=4096, batch=8 * 8 * pp)
        pricer = Pricer(graph(written()), cluster(f"{layout.world}xH100"), work, headroom=-20)  # all fits
        even = pricer._even(layout)
        level = even.roomy()
        assert max(level.seconds) <= max(even.seconds) * (1 + 1e-9)
        ratios.append(replayed(level) / replayed(even))
    assert max(ratios) < 1.005
    assert sum(ratios) / len(ratios) < 0.99


def test_stages_are_of_whole_layers_where_that_is_as_quick() -> None:
    g = graph(llama3_8b())
    begins = {i for i, n in enumerate(g.nodes) if n.block is not None and n.block != g.nodes[i - 1].block}
    pricer = Pricer(g, cluster("8xH100"), Workload(seq=4096, batch=64))
    for layout in (Layout(pp=2, tp=4, sequence_parallel=True), Layout(pp=4, tp=2), Layout(pp=4, tp=2, vpp=2)):
        even, placed = pricer._even(layout), pricer.partition(layout)
        whole = {*placed.bounds[1:-1]} <= begins
        assert whole or max(placed.seconds) < max(pricer._cut(evolve(even.problem, whole=True)).seconds) / 1.001
