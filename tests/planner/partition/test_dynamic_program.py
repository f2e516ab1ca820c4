"""Partitions by dynamic programming are optimal: compared with all partitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaloom.dsl.graph import Model, graph
from megaloom.examples.deepseek import deepseek_v3
from megaloom.examples.llama3 import llama3_70b
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.cost.columns import STEP_COLUMNS
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.partition.dynamic_program import ChainBatch, SegmentSums, balance, balance_all
from megaloom.planner.search.pricing import Pricer

SEGMENTS = st.lists(st.floats(0, 10), min_size=1, max_size=9)


def partitions(segments: list[float], count: int) -> list[tuple[int, ...]]:
    return [(0, *inner, len(segments)) for inner in combinations(range(1, len(segments)), count - 1)]


def runs(segments: list[float], bounds: tuple[int, ...]) -> list[float]:
    return [sum(segments[a:b]) for a, b in pairwise(bounds)]


def squares(segments: list[float], bounds: tuple[int, ...]) -> float:
    return sum(x * x for x in runs(segments, bounds))


@given(SEGMENTS, st.integers(1, 9))
def test_no_cut_is_more_even(segments: list[float], count: int) -> None:
    bounds = balance(SegmentSums.of(np.array(segments)), count)
    every = partitions(segments, count)
    if not every:
        assert bounds is None
        return
    assert bounds in every
    slowest = min(max(runs(segments, partition)) for partition in every)
    assert math.isclose(max(runs(segments, bounds)), slowest, rel_tol=1e-9, abs_tol=1e-9)
    even = min(squares(segments, partition) for partition in every if max(runs(segments, partition)) <= slowest + 1e-12)
    assert squares(segments, bounds) <= even + 1e-9


@pytest.mark.parametrize(
    ("segments", "bounds"), [(5, (0, 2, 5)), (7, (0, 2, 4, 7)), (8, (0, 2, 5, 8)), (10, (0, 2, 4, 7, 10))]
)
def test_of_equally_balanced_partitions_the_one_with_the_earliest_boundaries(
    segments: int, bounds: tuple[int, ...]
) -> None:
    assert balance(SegmentSums.of(np.ones(segments)), len(bounds) - 1) == bounds


@given(st.integers(1, 12), st.integers(1, 12), st.booleans(), st.data())
def test_many_chains_are_cut_as_each_is(size: int, count: int, more: bool, data: st.DataObject) -> None:
    if count > size:
        return
    seconds = st.lists(st.floats(0, 10) | st.sampled_from([1.0, 2.0]), min_size=size, max_size=size)
    last = np.minimum(np.arange(size + 1) + 2, size)
    chains = []
    for segments in data.draw(st.lists(seconds, min_size=1, max_size=4)):
        runs = SegmentSums.of(np.array(segments))
        beside = runs.sums / 2
        chains.append(SegmentSums(runs.sums, beside, beside[last], last) if more else runs)
    assert [tuple(bounds) for bounds in balance_all(ChainBatch.of(chains), count).tolist()] == [
        balance(x, count) for x in chains
    ]


@given(SEGMENTS, st.integers(1, 5), st.data())
def test_a_limit_on_each_run_is_kept(segments: list[float], count: int, data: st.DataObject) -> None:
    """Each stage has a memory limit for each start, since several hidden states may be received there."""
    size = len(segments)
    each = st.lists(st.integers(1, 9), min_size=size + 1, max_size=size + 1)
    limit = data.draw(st.lists(each, min_size=count, max_size=count))
    bounds = balance(
        SegmentSums.of(np.array(segments)), count, lambda k: np.minimum(np.arange(size) + limit[k][:-1], size)
    )
    every = [
        w for w in partitions(segments, count) if all(b - a <= n[a] for a, b, n in zip(w, w[1:], limit, strict=False))
    ]
    assert (bounds is None) == (not every)
    if bounds is not None:
        assert bounds in every
        slowest = min(max(runs(segments, partition)) for partition in every)
        assert math.isclose(max(runs(segments, bounds)), slowest, rel_tol=1e-9, abs_tol=1e-9)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_a_run_may_have_no_room_for_what_others_hold(sizes: list[int], limits: list[int]) -> None:
    sums = np.concatenate([[0], np.cumsum(sizes)])
    segments = [float(size % 4) for size in sizes]
    bounds = balance(
        SegmentSums.of(np.array(segments)),
        len(limits),
        lambda k: np.searchsorted(sums, sums[:-1] + limits[k], "right") - 1,
    )
    every = [
        partition
        for partition in partitions(segments, len(limits))
        if all(sum(sizes[a:b]) <= room for (a, b), room in zip(pairwise(partition), limits, strict=True))
    ]
    assert (bounds is None) == (not every)
    if bounds is not None:
        assert bounds in every
        assert max(runs(segments, bounds)) == min(max(runs(segments, partition)) for partition in every)


# By hand, in the notation of megatron-core's pipeline_model_parallel_layout: even layers, as NVIDIA's recipes of Llama
# cut; DeepSeek-V3's of Megatron-Bridge, "Et*3|(tt|)*29m|L", without its layer of multi-token prediction (with it:
# test_ahead.py); and of Megatron-MoE-ModelZoo's 256 GB200, "Et|(tt|)*30L".
BY_HAND = [
    (llama3_70b, Layout(pp=8, vpp=5, tp=4, sequence_parallel=True), "Ett|" + "tt|" * 38 + "ttL"),
    (deepseek_v3, Layout(pp=16, vpp=2, dp=64, ep=64), "Ettt|" + "tt|" * 28 + "t|t|L"),
    (deepseek_v3, Layout(pp=8, vpp=4, dp=128, ep=64), "Et|" + "tt|" * 30 + "L"),
]


@pytest.mark.parametrize(("written", "layout", "by_hand"), BY_HAND, ids=["llama3-70b", "deepseek-v3", "deepseek-v3 8"])
def test_the_slowest_chunk_is_no_slower_than_by_hand(
    written: Callable[[], Model], layout: Layout, by_hand: str
) -> None:
    g, machine = graph(written()), cluster(f"{layout.world}xH100")
    placed = Pricer(g, machine, Workload(seq=4096, batch=1024)).partition(layout)
    starts = [i for i, n in enumerate(g.nodes) if n.block is not None and n.block != g.nodes[i - 1].block]
    ends = [*starts[1:], next(i for i in range(starts[-1], len(g.nodes)) if g.nodes[i].block is None)]
    layers = [stage.count("t") for stage in by_hand.split("|")]
    assert sum(layers) == len(starts)
    bounds = [0, *(ends[n - 1] for n in accumulate(layers[:-1])), len(g.nodes)]
    rival = placed.problem.table.stage_sums(tuple(bounds))[:, STEP_COLUMNS].sum(axis=1)
    assert len(rival) == len(placed.seconds) == layout.pp * layout.vpp
    assert max(placed.seconds) <= rival.max()
    assert max(placed.seconds) < rival.max() or written is deepseek_v3  # whose head is less than a layer


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=12), st.data())
def test_runs_whose_first_atoms_take_more(segments: list[float], data: st.DataObject) -> None:
    """Sums and longest runs equal those computed segment by segment, with equal additions to the first segments."""
    size, first = len(segments), data.draw(st.integers(1, 4))
    more = data.draw(st.lists(st.floats(0, 5), min_size=size, max_size=size))
    before = np.concatenate([[0.0], np.cumsum(more)])
    last = np.minimum(np.arange(size + 1) + first, size)
    runs = SegmentSums(np.concatenate([[0.0], np.cumsum(segments)]), before, before[last], last)

    def takes(i: int, j: int) -> float:
        return sum(segments[i:j]) + sum(more[i : min(j, i + first)])

    for i in range(size):
        every = [takes(i, j) for j in range(i, size + 1)]
        assert np.allclose(runs(np.full(size + 1 - i, i), np.arange(i, size + 1)), every)
        limit = data.draw(st.floats(0, 40))
        far = i + max(k for k, seconds in enumerate(every) if seconds <= limit + 1e-9)
        near = i + max(k for k, seconds in enumerate(every) if seconds <= max(0, limit - 1e-9))
        assert near <= runs.farthest_from(i, limit) <= far
        assert near <= runs.farthest(limit)[i] <= far
    for count in range(1, size + 1):
        bounds = balance(runs, count)
        assert bounds is not None
        every = [max(takes(a, b) for a, b in pairwise(partition)) for partition in partitions(segments, count)]
        assert math.isclose(max(takes(a, b) for a, b in pairwise(bounds)), min(every), rel_tol=1e-9)
