"""Slow ranks are named; other stages, and a rank that is slow once, are not."""

import time
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from megaloom.planner.contract.layout import Layout
from megaloom.runtime.megatron import device

device.prepare()

from megaloom.runtime.metrics import display, slow_ranks  # noqa: E402
from megaloom.runtime.metrics.slow_ranks import RankTimes, SlowRanks, slow_line  # noqa: E402
from megaloom.runtime.metrics.step_times import Unit  # noqa: E402


def rank(number: int, stage: int, *seconds: float) -> RankTimes:
    return RankTimes(number, f"host-{number}", stage, seconds)


def test_ranks_are_compared_with_those_of_their_stage() -> None:
    ranks = [rank(0, 0, 1, 1, 1), rank(1, 0, 2, 2.5, 1.8), rank(2, 1, 9, 9, 9), rank(3, 1, 20, 9, 20)]
    says = "slow ranks (forward and backward time / median of their stage): rank 1 (host-1) 1.8x"
    assert slow_line(ranks) == says
    assert slow_line([rank(0, 0, 1), rank(1, 0, 1.2), rank(2, 1, 9)]) is None


def test_three_steps_are_compared_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = ("b", 0, (1.0, 1.0, 1.0))
    monkeypatch.setattr(slow_ranks, "gathered", lambda own: [own, fast])
    monkeypatch.setattr(slow_ranks.socket, "gethostname", lambda: "a")
    watch = SlowRanks(0)
    units = [Unit("forward", "compute", 0, 1), Unit("backward", "compute", 4, 5), Unit("send activation", "send", 1, 4)]
    lines = {step: watch.take(units) for step in range(1, 204) if watch.compares(step)}
    assert list(lines) == [3, 4, 5, 103, 104, 105, 203]
    assert {step for step, line in lines.items() if line} == {5, 105}
    assert str(lines[5]).endswith("rank 0 (a) 2.0x")


def test_a_clock_that_moves_is_named_and_changes_no_duration(plan_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = display.ProgressDisplay(Console(file=StringIO(), width=120), plan_of("tiny_gpt", Layout()), 10)
    now = time.time
    shown.name_moved_clock()
    for moved in (-7200, 0):
        monkeypatch.setattr(display.time, "time", lambda moved=moved: now() + moved)
        shown.name_moved_clock()
        shown.name_moved_clock()
    says = "the clock of this machine was set {} by 2:00:00; the times shown here do not change\n"
    assert shown.console.file.getvalue() == says.format("back") + says.format("ahead")  # type: ignore[attr-defined]
    assert 0 <= time.monotonic() - shown.start < 60
