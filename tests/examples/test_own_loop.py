"""The loop of examples/scripts trains, continues from its checkpoint, and runs under torchrun."""

import multiprocessing
import os
import runpy
import socket
from pathlib import Path

import pytest

from megaloom.dsl.catalog import find
from megaloom.examples.scripts.own_loop import train
from megaloom.planner import cluster, plan
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.runtime.launch import launcher
from tests.support.limits import LIMIT
from tests.support.paths import ROOT, TEST_MODELS


def test_it_trains_and_continues(tmp_path: Path) -> None:
    model, ref = find(f"{TEST_MODELS / 'small.py'}:byte_llama")
    workload = Workload(seq=32, batch=8, precision=Precision.FP32)
    fixed = {"dp": 2}
    made = plan(model, cluster("2xCPU"), workload, ref=ref, fixed=fixed).best
    losses = launcher.run(train, (made, tmp_path), 2, timeout=LIMIT)
    assert losses[0] == losses[1] < 2.0
    assert (tmp_path / "step-000020").exists()
    continued = launcher.run(train, (made, tmp_path), 2, timeout=LIMIT)
    assert continued == losses


def test_the_program_has_about_forty_lines() -> None:
    lines = (ROOT / "examples/scripts/own_loop.py").read_text().splitlines()
    assert len(lines) < 50


def program(rank: int, port: int, folder: Path) -> None:
    """Run the program as one of two processes of torchrun, which says so by these variables."""
    os.chdir(folder)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    runpy.run_module("megaloom.examples.scripts.own_loop", run_name="__main__")


def test_it_runs_as_processes_of_torchrun(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`tests/runtime/cli/test_main.py` starts torchrun itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=program, args=(rank, port, tmp_path)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(LIMIT)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert "step 15: loss" in capfd.readouterr().out
    assert (tmp_path / "runs/own-loop/step-000020").exists()
