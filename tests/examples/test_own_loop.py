"""The loop of examples/scripts trains, continues from its checkpoint, and runs under torchrun."""

import subprocess
import sys
from pathlib import Path

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


def test_it_runs_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "megaloom.examples.scripts.own_loop"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert "step 15: loss" in done.stdout
    assert (tmp_path / "runs/own-loop/step-000020").exists()
