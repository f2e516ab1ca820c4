"""The schedules are megatron-core's, and a replay obeys what every schedule must."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megaloom.planner import timeline
from megaloom.planner.timeline import Timeline, replay
from megaloom.runtime import device

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


def cases() -> list[tuple[int, int, int]]:
    return [
        (p, v, m)
        for p in range(1, 9)
        for v in ((1, 2, 3, 4) if p > 1 else (1,))
        for m in range(1, 33)
        if v == 1 or m % p == 0
    ]


def test_warmup_and_order_are_megatron_cores() -> None:
    device.prepare()  # once imported without, megatron-core could not be made ready for the tests that run after
    from megatron.core.pipeline_parallel import schedules

    for p, v, m in cases():
        for rank in range(p):
            group = SimpleNamespace(size=lambda p=p: p, rank=lambda rank=rank: rank)
            talk = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=v if v > 1 else None)
            total, _, ahead, remaining = schedules.get_pp_rank_microbatches(m, v, p, p2p_communicator=talk)
            assert timeline.warmup(rank, p, v, m) == ahead
            rows = schedules.get_schedule_table(m, v, p if v > 1 else m)
            steps = timeline.order(rank, p, v, m)
            forward = [(s.microbatch, s.stage // p) for s in steps if not s.backward]
            backward = [(s.microbatch, v - 1 - s.stage // p) for s in steps if s.backward]
            assert forward == rows
            assert backward == rows
            assert len(steps) == 2 * total
            kinds = [s.backward for s in steps]
            assert kinds == [False] * ahead + [False, True] * remaining + [True] * ahead
            assert all(s.stage % p == rank for s in steps)


def test_micro_batches_in_flight() -> None:
    for p, v, m in cases():
        for rank in range(p):
            most = max(map(sum, timeline.held(rank, p, v, m)))
            closed = p - rank if v == 1 else 2 * (p - rank - 1) + (v - 1) * p + 1
            assert most == min(closed, m * v)


@given(pipelines())
def test_every_step_waits_for_its_input_and_its_rank(case: Any) -> None:
    pp, vpp, microbatches, forward, backward, transfer = case
    line = replay(forward, backward, transfer, pp, microbatches)
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
def test_no_rank_is_busier_than_the_makespan_and_no_replay_beats_the_bound(case: Any) -> None:
    pp, _, microbatches, forward, backward, transfer = case
    line = replay(forward, backward, transfer, pp, microbatches)
    total = [f + b for f, b in zip(forward, backward, strict=True)]
    for rank in range(pp):
        assert math.isclose(line.busy[rank], microbatches * sum(total[rank::pp]))
        assert line.busy[rank] + line.sending[rank] <= line.makespan * (1 + 1e-12)
    assert line.makespan >= timeline.bound(total, pp, microbatches) * (1 - 1e-12)
    assert line.makespan >= replay(forward, backward, [0.0] * len(total), pp, microbatches).makespan
    assert -1e-12 <= line.bubble < 1


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 6), SECONDS, SECONDS)
def test_uniform_stages_have_the_known_bubble(pp: int, vpp: int, rounds: int, ahead: float, back: float) -> None:
    vpp = vpp if pp > 1 else 1
    m = rounds * pp
    stages = pp * vpp
    line: Timeline = replay([ahead] * stages, [back] * stages, [0.0] * stages, pp, m)
    assert math.isclose(line.bubble, (pp - 1) / (m * vpp + pp - 1), abs_tol=1e-9)
    assert math.isclose(line.makespan, timeline.bound([ahead + back] * stages, pp, m))
