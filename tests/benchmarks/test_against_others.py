"""Programs that are started together take turns, and one that fails does not hold up the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import against_others
from benchmarks.against_others import LLAMA, report, run
from benchmarks.opponents.task import MARK, ROUNDS

PROGRAM = f"""
import json, sys, time
from pathlib import Path
from benchmarks.opponents.turns import Turns

turns, log = Turns.given(), Path(sys.argv[1])
if turns.name == "fails":
    raise ValueError("no kernel for this")
for turn in range({ROUNDS}):
    turns.begin(turn)
    with log.open("a") as file:
        file.write(f"begin {{turns.name}}\\n")
    time.sleep(0.05)
    with log.open("a") as file:
        file.write(f"end {{turns.name}}\\n")
    turns.end(turn)
print({MARK!r} + json.dumps(dict(step_ms=[2.0, 3.0, 9.0], first_step_at=time.time(), gib=1.5, parameters=7)))
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which programs write when a turn begins and ends."""
    path = tmp_path / "log"
    monkeypatch.setattr(against_others, "command", lambda program, task: [sys.executable, "-c", PROGRAM, str(path)])
    return path


def test_turns_do_not_overlap(log: Path) -> None:
    results = run(["ours", "fails", "te"], LLAMA, 60)
    lines = log.read_text().splitlines()
    assert lines == [f"{what} {name}" for _ in range(ROUNDS) for name in ("ours", "te") for what in ("begin", "end")]
    ours, fails, te = results
    assert fails == {"error": "ValueError: no kernel for this"}
    assert ours["step_ms"] == te["step_ms"] and 0 < ours["start_s"] < 60


def test_a_program_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        against_others, "command", lambda program, task: [sys.executable, "-c", "import time; time.sleep(60)"]
    )
    assert run(["ours"], LLAMA, 0.5) == [{"error": "not finished within the limit of --seconds"}]


def test_the_report_compares_medians_with_ours() -> None:
    one = {"gib": 1.0, "start_s": 2.0, "parameters": 7}
    known = {
        ("A", "ours"): {**one, "step_ms": [10.0, 30.0, 20.0]},
        ("A", "te"): {**one, "step_ms": [22.0, 21.0, 90.0], "parameters": 8},
        ("A", "plain"): {"error": "out of memory"},
        ("B", "ours"): {**one, "step_ms": [1.0, 1.0, 1.0]},
    }
    ours, te, plain, sizes = report("A", known).splitlines()
    assert ours.split()[2:4] == ["20.0", "1.000"] and te.split()[2:4] == ["22.0", "1.100"]
    assert plain.endswith("out of memory") and "not the same model: 7, 8 parameters" in sizes
