"""The schedules are megatron-core's, and a timeline obeys what every schedule must."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megaloom.planner.bounds import pipeline
from megaloom.planner.pipeline import schedules, timeline
from megaloom.planner.pipeline.timeline import Timeline, simulate_timeline
from megaloom.runtime.megatron import device

SECONDS = st.floats(0.01, 10)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[int, int, int, list[float], list[float], list[float]]:
    pp, vpp = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    if pp == 1:
        vpp = 1
    microbatches = pp * draw(st.integers(1, 4)) if vpp > 1 else draw(st.integers(1, 16))
    stages = pp * vpp
    times = [draw(st.lists(SECONDS, min_size=stages, max_size=stages)) for _ in range(3)]
    return pp, vpp, microbatches, *times


def grouped(pp: int, microbatches: int) -> list[int]:
    """Every group size that megatron-core takes (schedules.py:996)."""
    return [g for g in range(pp, microbatches + 1) if not 0 < microbatches % g < pp]


def cases(most: int, chunks: int, microbatches: int) -> Iterator[tuple[int, int, int, int]]:
    """(pp, vpp, micro-batches, group)"""
    for p in range(1, most + 1):
        for m in range(1, microbatches + 1):
            yield p, 1, m, 0
            for g in grouped(p, m) if p > 1 else ():
                for v in range(2, chunks + 1):
                    yield p, v, m, g


def few() -> list[tuple[int, int, int, int]]:
    """All small cases, and 400 of all up to 16 ranks, 8 chunks and 64 micro-batches."""
    return [*cases(4, 3, 12), *random.Random(7).sample(list(cases(16, 8, 64)), 400)]


def test_warmup_and_tables_are_megatron_cores() -> None:
    """For every rank of up to 16, with up to 8 chunks, 64 micro-batches and every legal size of their groups."""
    device.prepare()  # once imported without, megatron-core could not be made ready for the tests that run after
    from megatron.core.pipeline_parallel import schedules as core

    tables = {(v, m, g) for _, v, m, g in cases(16, 8, 64)}
    for v, m, g in tables:
        passes = (divmod(one, m) for one in schedules.pass_order(0, 1, v, m, g or m))
        assert [(i, visit) for visit, i in passes if visit < v] == core.get_schedule_table(m, v, g or m)
    group = SimpleNamespace(size=lambda: group.ranks, rank=lambda: group.mine)
    talk = SimpleNamespace(pp_group=group)
    for p, v, m, g in cases(16, 8, 64):
        group.ranks, talk.virtual_pipeline_model_parallel_size = p, v if v > 1 else None
        for rank in range(p):
            group.mine = rank
            _, _, ahead, _ = core.get_pp_rank_microbatches(m, v, g or m, p2p_communicator=talk)
            assert schedules.warmup(rank, p, v, m, g) == ahead


def test_order_and_flights_are_megatron_cores() -> None:
    """The order of a rank is megatron-core's, and so is its number of micro-batches in flight."""
    device.prepare()
    from megatron.core.pipeline_parallel import schedules as core
    from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order

    for p, v, m, g in few():
        rows = core.get_schedule_table(m, v, g or m)
        for rank in range(p):
            ahead = schedules.warmup(rank, p, v, m, g)
            order = convert_schedule_table_to_order(ahead, v, rows)
            steps = timeline.rank_order(rank, p, v, m, g)
            assert [(s.stage // p + 1) * (-1 if s.backward else 1) for s in steps] == order
            assert [(s.microbatch, s.stage // p) for s in steps if not s.backward] == rows
            assert [(s.microbatch, v - 1 - s.stage // p) for s in steps if s.backward] == rows
            assert all(s.stage % p == rank for s in steps)
            moments = schedules.memory_moments(p, v, m, g)
            assert set(map(tuple, moments.in_flight[rank, moments.backward].tolist())) == fullest(order, v)


def fullest(order: Sequence[int], chunks: int) -> set[tuple[int, ...]]:
    """The sets in flight, by chunk, before each backward that follows a forward."""
    now, results, before = [0] * chunks, set(), 0
    for step in order:
        if step < 0 < before:
            results.add(tuple(now))
        now[abs(step) - 1] += 1 if step > 0 else -1
        before = step
    return results


def test_micro_batches_in_flight() -> None:
    for p, v, m, g in few():
        for rank in range(p):
            most = schedules.memory_moments(p, v, m, g).in_flight[rank].sum(axis=-1).max()
            closed = p - rank if v == 1 else 2 * (p - rank - 1) + (v - 1) * g + 1
            assert most == min(closed, m * v)


@given(pipelines())
def test_the_end_is_foreseen(case: Any) -> None:
    """The shortcuts of `finish_times` change nothing, for few micro-batches and for many."""
    pp, vpp, microbatches, forward, backward, transfer = case
    for m in (microbatches, 40 * pp):
        for group in (0, 2 * pp) if vpp > 1 and m % (2 * pp) == 0 else (0,):
            ends = simulate_timeline(forward, backward, transfer, pp, m, group).ends
            result = schedules.finish_times(forward, backward, transfer, pp, m, group)
            assert np.allclose(result, ends, rtol=1e-11, atol=0)
            assert {type(end) for end in result} == {float}
            even = [1.0] * (pp * vpp)
            ends = simulate_timeline(even, even, [0.01] * (pp * vpp), pp, m, group).ends
            assert np.allclose(
                schedules.finish_times(even, even, [0.01] * (pp * vpp), pp, m, group), ends, rtol=1e-11, atol=0
            )


@given(pipelines())
def test_every_step_waits_for_its_input_and_its_rank(case: Any) -> None:
    pp, vpp, microbatches, forward, backward, transfer = case
    line = simulate_timeline(forward, backward, transfer, pp, microbatches)
    events = {event.step: event for rank in line.events for event in rank}
    assert len(events) == 2 * microbatches * pp * vpp
    last = pp * vpp - 1
    for step, event in events.items():
        assert event.end == event.start + (backward if step.backward else forward)[step.stage]
        if step.backward and step.stage == last:
            assert event.start >= events[step._replace(backward=False)].end
        elif step.backward or step.stage:
            before = step._replace(stage=step.stage + (1 if step.backward else -1))
            assert event.start >= events[before].end + transfer[min(before.stage, step.stage)]
    for rank in line.events:
        assert all(a.end <= b.start for a, b in pairwise(rank))


@given(pipelines())
def test_no_rank_is_busier_than_the_makespan(case: Any) -> None:
    pp, _, microbatches, forward, backward, transfer = case
    line = simulate_timeline(forward, backward, transfer, pp, microbatches)
    total = [f + b for f, b in zip(forward, backward, strict=True)]
    busy = [microbatches * sum(total[rank::pp]) for rank in range(pp)]
    blocked = [0.0] * pp  # by a rank's own sends, which are only awaited without interleaving
    if len(total) == pp:
        blocked = [microbatches * sum(transfer[max(0, rank - 1) : min(rank + 1, pp - 1)]) for rank in range(pp)]
    for rank, events in enumerate(line.events):
        assert math.isclose(busy[rank], sum(event.end - event.start for event in events))
        assert busy[rank] + blocked[rank] <= line.makespan * (1 + 1e-12)
    assert line.makespan >= simulate_timeline(forward, backward, [0.0] * len(total), pp, microbatches).makespan
    assert sum(busy) + sum(blocked) <= pp * line.makespan * (1 + 1e-12)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 6), SECONDS, SECONDS)
def test_uniform_stages_have_the_known_bubble(pp: int, vpp: int, rounds: int, ahead: float, back: float) -> None:
    vpp = vpp if pp > 1 else 1
    m = rounds * pp
    stages = pp * vpp
    line: Timeline = simulate_timeline([ahead] * stages, [back] * stages, [0.0] * stages, pp, m)
    bubble = 1 - m * stages * (ahead + back) / (pp * line.makespan) if ahead + back else 0.0
    assert math.isclose(bubble, (pp - 1) / (m * vpp + pp - 1), abs_tol=1e-9)
    assert math.isclose(line.makespan, pipeline.finish_bounds(*[[t] * stages for t in (ahead, back, 0.0)], pp, m).max())
