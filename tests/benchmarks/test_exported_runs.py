"""Exported scripts for Megatron-LM: what is written of each case, and the rows that their logs give."""

from __future__ import annotations

from pathlib import Path

from benchmarks import exported_runs
from benchmarks.exported_runs import CASES, measured, write
from benchmarks.gpu_cases import planned
from benchmarks.gpu_report import append, compared, read
from megaloom.planner.contract.plan_json import load
from megaloom.planner.contract.workload import Runtime
from megaloom.planner.runs.read import RunInputs, read_file

MEMORY = "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1024.00 | max allocated: {} | max reserved: 40960.00"


def logged(folder: Path, name: str, *seconds: float) -> Path:
    lines = [
        f" iteration {i:8d}/ {len(seconds):8d} | elapsed time per iteration (ms): {1e3 * one:.1f} |"
        for i, one in enumerate(seconds, 1)
    ]
    path = folder / f"{name}.log"
    path.write_text("\n".join([*lines[:2], MEMORY.format("20480.00"), *lines[2:]]))
    return path


def test_a_script_states_the_layout_of_its_plan(tmp_path: Path) -> None:
    write(tmp_path, "H100")
    for name, case in CASES.items():
        plan, run = load(tmp_path / f"{name}.json"), read_file(str(tmp_path / f"{name}.sh"), RunInputs())
        assert plan.runtime is Runtime.MEGATRON and plan.layout == case.layout
        assert (run.layout, run.workload) == (plan.layout, plan.workload)


def test_a_log_gives_the_median_step_and_the_most_memory_and_its_error_if_it_has_none(tmp_path: Path) -> None:
    log, failed = logged(tmp_path, "mixtral-ep2", 9.0, 2.0, 2.0, *[0.5] * 9), tmp_path / "qwen3-1.log"
    failed.write_text("[rank0]: torch.OutOfMemoryError: CUDA out of memory.\tTried\nthe end")
    output = tmp_path / "runs.tsv"
    for path in (log, failed):
        append(output, measured(path.stem, path, "H100", "torch 2.11"))
    good, bad = read(output)
    assert (good.step_seconds, good.steps, good.memory_gib, good.reserved_gib) == (0.5, 9, 20.0, 40.0)
    assert good.gpus == "2xH100" and not good.error
    assert bad.error == "OutOfMemoryError: CUDA out of memory. Tried" and bad.step_seconds == 0
    (row,) = compared([good, bad], tuple(CASES.values()))
    assert row.step_seconds == planned(CASES["mixtral-ep2"], "H100").predicted.step_seconds


def test_names_of_cases_differ() -> None:
    assert len({case.name for case in exported_runs.CASES.values()}) == len(CASES)
