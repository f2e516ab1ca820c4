"""Failures and checkpoints: the least loss, and the loss of published runs."""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from megaloom.planner.cli.main import main
from megaloom.planner.contract.workload import Precision
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.report.goodput import (
    RECOVERY_SECONDS,
    checkpoint_interval,
    goodput,
    lasting_share,
)

SAVE, MEAN = st.floats(0.1, 600), st.floats(1800, 1e7)


def test_llama_3_on_16384_devices() -> None:
    """More than 90 % (The Llama 3 Herd of Models, section 3.3.4): a failure every 3 hours."""
    result = goodput(405_850_000_000, Precision.BF16, cluster("16384xH100"), 5.0)
    assert result is not None
    assert result.failure_seconds == pytest.approx(54 * 86400 / 419)
    assert 0.90 < result.share < 0.95
    assert result.checkpoint_nbytes == 14 * 405_850_000_000
    assert result.checkpoint_nbytes / 16384 < 4e9  # "1 MB to 4 GB per GPU"


@given(SAVE, MEAN, st.floats(0.2, 5))
def test_no_interval_is_better(save: float, mean: float, times: float) -> None:
    best = checkpoint_interval(save, mean)
    assert lasting_share(times * best, save, mean, RECOVERY_SECONDS) <= 1.0005 * lasting_share(
        best, save, mean, RECOVERY_SECONDS
    )


@given(MEAN)
def test_quick_checkpoints_are_youngs(mean: float) -> None:
    assert checkpoint_interval(0.01, mean) == pytest.approx(sqrt(0.02 * mean), rel=0.01)


@given(st.integers(1, 10**12), st.sampled_from([1024, 4096, 16384]), st.floats(0.1, 60))
def test_more_failures_and_slower_storage_are_never_better(params: int, count: int, step: float) -> None:
    machine = cluster(f"{count}xH100")
    worse = (evolve(machine, failures=2 * machine.failures), evolve(machine, storage=machine.storage / 2))
    shares = [goodput(params, Precision.BF16, c, step).share for c in (machine, *worse)]  # type: ignore[union-attr]
    assert 0 <= max(shares[1:]) <= shares[0] * 1.0005
    assert shares[0] <= 1


def test_failures_that_leave_no_time() -> None:
    frail = evolve(cluster("1024xH100"), failures=1.0)
    assert goodput(10**12, Precision.BF16, frail, 30.0).share < 1e-6  # type: ignore[union-attr]
    assert goodput(10**9, Precision.BF16, evolve(frail, failures=0.0), 30.0) is None


def test_large_clusters_are_told_of_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fixed = ("--tp", "1", "--pp", "1", "--cp", "1", "--micro-batch", "1", "--recompute", "none")
    assert main(["gpt2", "--gpus", "512..1024xH100", *fixed]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[-5:] == ["goodput", "save", "every", "speed", "layout"]
    assert [(line.count("%"), line.count("steps")) for line in lines] == [(2, 1), (2, 1)]
    assert main(["gpt2", "--gpus", "512xH100", *fixed]) == 0
    assert "goodput" not in capsys.readouterr().out
    assert main(["gpt2", "--gpus", "1024xH100", *fixed]) == 0
    assert "is best; it has" in capsys.readouterr().out
    assert main(["gpt2", "--gpus", "1024xH100", *fixed, "--json"]) == 0
    assert 0.9 < json.loads(capsys.readouterr().out)["plans"][0]["goodput"]["share"] < 1
