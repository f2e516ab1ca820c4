"""The runner of GPU cases on CPU ranks: one start for several device meshes, errors and timeouts, and the report."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from benchmarks import gpu_report, gpu_runs
from benchmarks.gpu_cases import CASES, Case, planned
from benchmarks.gpu_report import Measured, append, compared, read, report
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision
from megaloom.planner.report.units import peak_memory
from tests.support.paths import TESTS

TINY = f"{TESTS / 'support' / 'models' / 'small.py'}:tiny_llama"
BUDGET = gpu_runs.Budget(steps=3, uncounted=1, case=60.0, last=240.0)


def tiny(**layout: Any) -> Case:
    return Case("tiny", TINY, 32, 4, Layout(**layout), precision=Precision.FP32)


FSDP, TENSOR, PIPELINE = tiny(dp=2, shard="weights"), tiny(tp=2, sequence_parallel=True), tiny(pp=2)


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_runs, "RESULTS", tmp_path / "none.tsv")
    return tmp_path / "runs.tsv"


def test_one_start_runs_several_meshes(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts, start = [], gpu_runs.launcher.run
    monkeypatch.setattr(gpu_runs.launcher, "run", lambda *args: starts.append(args) or start(*args))
    cases = [FSDP, TENSOR, PIPELINE, evolve(FSDP, batch=8)]
    gpu_runs.run(cases[:1], "CPU", output, BUDGET)
    gpu_runs.run(cases, "CPU", output, BUDGET)  # goes on
    rows = read(output)
    assert [len(args[1][0]) for args in starts] == [1, 2, 1]  # sharded weights have an environment of their own
    assert rows[0].case == FSDP.name and {row.case for row in rows} == {case.name for case in cases}
    assert all(row.step_seconds > 0 and row.steps == 2 and not row.error for row in rows)
    assert all(f"torch {torch.__version__.partition('+')[0]}" in row.libraries for row in rows)
    assert "held out, step" in report(rows, cases) and len(compared(rows, cases)) == 4


def test_the_rest_runs_after_an_error_and_after_a_case_that_hangs(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = gpu_runs.measured

    def troubled(case: Case, *rest: Any) -> Measured:
        if case == FSDP and int(os.environ["RANK"]) == 1:
            raise torch.OutOfMemoryError("no memory is left")
        if case == TENSOR:
            time.sleep(60)
        return measured(case, *rest)

    monkeypatch.setattr(gpu_runs, "measured", troubled)
    cases = [FSDP, PIPELINE, TENSOR]
    gpu_runs.run(cases, "CPU", output, evolve(BUDGET, case=8.0))
    errors = {row.case: row.error for row in read(output)}
    assert list(errors) == [PIPELINE.name, TENSOR.name, FSDP.name]
    assert "no memory is left" in errors[FSDP.name]
    assert errors[TENSOR.name] == "it did not end within 8 s" and not errors[PIPELINE.name]


def test_no_case_begins_after_the_limit(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu_runs.run([FSDP], "CPU", output, evolve(BUDGET, last=0.0))
    assert not read(output) and f"left for the next command: {FSDP.name}" in capsys.readouterr().out


def test_cases_separate_what_a_micro_batch_and_an_expert_cost() -> None:
    assert len(CASES) == len({case.name for case in CASES}) >= 40
    assert len({case.family for case in CASES}) >= 12
    assert {case.microbatches for case in CASES} == {1, 2, 4, 8}
    assert {case.gpus for case in CASES} == {1, 2} and {case.layout.ep for case in CASES} == {1, 2}
    assert 0.25 < sum(case.held_out for case in CASES) / len(CASES) < 0.45
    for held in (True, False):
        assert {case.backend for case in CASES if case.held_out is held} == {"torch", "te"}


@pytest.mark.parametrize("case", CASES[::12], ids=lambda case: case.name)
def test_a_case_fits_an_h100(case: Case) -> None:
    plan = planned(case, "H100")
    assert plan.layout == case.layout and peak_memory(plan) <= plan.cluster.device.nbytes


def test_the_report_keeps_halves_apart(tmp_path: Path) -> None:
    held, fitted = (next(c for c in CASES if c.held_out is out and c.gpus == 1) for out in (True, False))
    file, seconds = tmp_path / "runs.tsv", {}
    for case, off in ((held, 0.8), (fitted, 1.25)):
        seconds[case.name] = planned(case, "H100").predicted.step_seconds * off
        append(file, Measured(case=case.name, gpus="1xH100", step_seconds=9.0))  # an older run
        append(file, Measured(case=case.name, gpus="1xH100", step_seconds=seconds[case.name]))
    append(file, Measured(case=CASES[-1].name, gpus="2xH100", error="out of memory"))
    text = report(read(file))
    assert "held out, step: 1 runs, median 25.0%, nine of ten below 25.0%" in text
    assert "fitted and known, step: 1 runs, median 20.0%, nine of ten below 20.0%" in text
    assert "held out, memory: no runs" in text and f"failed: {CASES[-1].name} on 2xH100: out of memory" in text
    known = [evolve(row, origin="a page") for row in read(file)]
    assert "held out, step: no runs" in report(known)


def test_nine_of_ten() -> None:
    assert gpu_report.Score.of([i / 100 for i in range(1, 11)]) == gpu_report.Score(10, 0.055, 0.09)


def test_options_have_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_runs"])
    asked = gpu_runs.options()
    assert gpu_runs.Budget(steps=asked.steps, case=asked.timeout, last=asked.limit).steps == 12
