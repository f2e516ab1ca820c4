"""Cores and memory are those that a container leaves."""

import os
from pathlib import Path

import psutil
import pytest

from megaloom.runtime.megatron.host import host_memory, usable_cores


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "300000 100000"}, 3),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "1600000 100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    ],
)
def test_cores(files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_memory(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    assert host_memory(tmp_path) == psutil.virtual_memory().total
    (tmp_path / name).write_text("max\n")
    assert host_memory(tmp_path) == psutil.virtual_memory().total
    (tmp_path / name).write_text(f"{2**30}\n")
    assert host_memory(tmp_path) == 2**30


def test_this_host() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
    assert 2**20 < host_memory() <= psutil.virtual_memory().total
