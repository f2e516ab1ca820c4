"""The campaign over NCCL, on CPU ranks over gloo: what fails is recorded, and the rest runs to its end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from tests.support.parity import nccl_ranks, nccl_table
from tests.support.parity.nccl_ranks import Job
from tests.support.parity.nccl_rows import Key, Row, append, read, report

KEYS = [Key("vit", layout, "fp32") for layout in ("DP2", "DP2 weights", "TP2 SP", "PP2 VPP2", "CP2", "EP2")]


def job(output: Path) -> Job:
    return Job("CPU", output, timeout=30.0, until=time.monotonic() + 240)


def test_errors_hangs_and_killed_ranks_cost_one_case_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = nccl_ranks._planned

    def troubled(key: Key, gpu: str) -> Any:
        rank = int(os.environ["RANK"])
        if key.layout == "DP2" or (key.layout == "TP2 SP" and rank == 1):
            raise ValueError(f"no kernel for rank {rank}\nand a second line")
        if key.layout == "PP2 VPP2" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return planned(key, gpu)

    monkeypatch.setattr(nccl_ranks, "_planned", troubled)
    monkeypatch.setattr(nccl_ranks, "GRACE", nccl_ranks.GRACE / 10)
    output = tmp_path / "rows.jsonl"
    append(output, Row.of(KEYS[1], agrees=True))  # of an earlier command
    assert nccl_table.run(KEYS, job(output)) == []
    rows = read(output)
    assert [key.layout for key in rows] == ["DP2 weights", "DP2", "TP2 SP", "PP2 VPP2", "CP2"]
    assert rows[KEYS[1]] == Row.of(KEYS[1], agrees=True)
    assert [rows[KEYS[i]].error for i in (0, 2)] == [f"ValueError: no kernel for rank {i // 2}" for i in (0, 2)]
    assert "SIGKILL" in rows[KEYS[3]].error
    assert rows[KEYS[4]].agrees and 0 < rows[KEYS[4]].gradient_error < 1e-5
    table = report(rows, list(nccl_ranks.LAYOUTS))
    assert "| vit | error | – | – | 0e+00 | error | error |" in table and "vit, DP2, fp32: error: ValueError" in table


def test_no_case_begins_when_the_time_is_over(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    assert nccl_table.run(KEYS[:2], evolve(job(output), until=time.monotonic())) == KEYS[:2] and not read(output)


def test_a_case_whose_gradients_are_wrong_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = nccl_ranks._planned

    def doubled(key: Key, gpu: str) -> Any:
        curve, gradients = planned(key, gpu)
        return curve, gradients and {name: (2 * value, off) for name, (value, off) in gradients.items()}

    monkeypatch.setattr(nccl_ranks, "_planned", doubled)
    output = tmp_path / "rows.jsonl"
    nccl_table.run(KEYS[4:5], job(output))
    (row,) = read(output).values()
    assert not row.agrees and row.gradient_error == pytest.approx(1.0, rel=1e-3) and row.cell == "1e+00!"
