"""A run on two hosts: each reads its own copy of the data, and the death of one ends the run with a clear error."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plan_json import save
from megaloom.runtime.data.indexed import write_indexed
from tests.support.hosts import two_hosts
from tests.support.limits import LIMIT


def test_the_death_of_a_host_ends_the_run(plan_of, tmp_path: Path) -> None:
    save(plan_of("byte_llama", Layout(dp=2)), plan := tmp_path / "plan.json")
    disks = [tmp_path / "disk-0", tmp_path / "disk-1"]
    seen = tmp_path / "disk"  # each host has its own data there
    seen.mkdir()
    disks[0].mkdir()
    text = np.frombuffer(Path(__file__).read_bytes() * 4, np.uint8)
    write_indexed([text], disks[0] / "books", "u1")
    shutil.copytree(disks[0], disks[1])
    run = tmp_path / "run"
    train = ["-m", "megaloom.runtime.cli", "train", str(plan), "--data", str(seen / "books"), "--out", str(run)]
    options = ["--steps", "100000", "--save-every", "5", "--split", "9,1,0"]
    try:
        with two_hosts() as hosts:
            meeting = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", hosts[0].address]
            torchrun = [sys.executable, "-m", "torch.distributed.run", *meeting, "--master-port", "29555"]
            nodes = [
                host.start([*torchrun, "--node-rank", str(i), *train, *options], mounts={seen: disks[i]})
                for i, host in enumerate(hosts)
            ]
            try:
                deadline = time.monotonic() + LIMIT
                while not (run / "step-000005").is_dir() and time.monotonic() < deadline:
                    assert nodes[0].poll() is None, nodes[0].communicate()[0]
                    time.sleep(0.05)
                os.kill(nodes[1].pid, signal.SIGKILL)  # torchrun on the second host, and its rank with it
                output, _ = nodes[0].communicate(timeout=LIMIT)
            finally:
                for node in nodes:
                    if node.poll() is None:
                        os.killpg(node.pid, signal.SIGKILL)
                    node.communicate()
            first = hosts[0].name
    except OSError as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    assert nodes[0].returncode == 1
    assert f"megaloom: rank 0 ({first}) has lost another rank, whose error is the cause: " in output
    assert "is saved; the same command continues from it." in output, output
    left = subprocess.run(["pgrep", "-f", f"--out {run}"], capture_output=True, text=True, check=False).stdout
    assert left == ""
