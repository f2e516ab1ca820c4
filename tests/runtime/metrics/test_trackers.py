"""Trackers: TensorBoard's and W&B's files have the curves of metrics.jsonl, and a continued run continues them."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from megaloom.dsl import UserError
from megaloom.runtime.metrics import monitoring
from megaloom.runtime.metrics.metrics_file import MetricsFile, read_metrics
from megaloom.runtime.metrics.monitoring import Monitoring
from megaloom.runtime.metrics.trackers import curves, open_trackers


def write_steps(options: Monitoring, run: Path, first: int, last: int) -> None:
    """Write metrics as a run does from step `first` to `last`. The loss of each step is its number."""
    with open_trackers(options, run, done=first - 1, options={"lr": 1e-3}) as logs:
        metrics = MetricsFile(run / "metrics.jsonl", last_step=first - 1, trackers=logs)
        for step in range(first, last + 1):
            metrics.write("step", step=step, loss=float(step), terms={"aux": 0.5}, skipped=False)
        metrics.write("evaluation", step=last, loss=0.25, perplexity=math.inf)


def test_curves_are_the_finite_numbers_of_an_event() -> None:
    values = {"loss": 1.5, "terms": {"a": 2}, "loss_scale": None, "name": "x", "bad": math.nan, "skipped": True}
    assert curves("step", values) == {"step/loss": 1.5, "step/terms/a": 2.0, "step/skipped": 1.0}


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_steps(Monitoring(tensorboard=True), tmp_path, 1, 5)
    write_steps(Monitoring(tensorboard=True), tmp_path, 4, 6)  # step 4 and 5 were lost
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = {(p.step, p.value) for p in shown.Scalars("step/loss")}
    assert points == {(step, float(step)) for step in range(1, 7)}
    assert [p.step for p in shown.Scalars("step/loss")] == [1, 2, 3, 4, 5, 6]
    assert {"step/terms/aux", "evaluation/loss"} <= set(shown.Tags()["scalars"])
    assert "evaluation/perplexity" not in shown.Tags()["scalars"]
    assert [e["step"] for e in read_metrics(tmp_path / "metrics.jsonl") if e["event"] == "step"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"peak_nbytes": None}, "peak_nbytes"),
        ({"terms": 0.5}, "terms"),
        ({"terms": {"a": "x"}}, "terms"),
        ({"lr": "x"}, "lr"),
    ],
)
def test_a_value_that_is_not_written_is_refused(tmp_path: Path, wrong: dict[str, Any], field: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"event": "step", "step": 1, "loss": None} | more) + "\n" for more in ({}, wrong))
    )
    with pytest.raises(UserError, match=f"line 2: {field} is .*\nremove that line"):
        read_metrics(path)


def test_wandb_offline_keeps_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    run.mkdir()
    write_steps(Monitoring(wandb="tests"), run, 1, 3)
    own = (run / "wandb-id").read_text()
    time.sleep(1)  # W&B names a folder by the second
    write_steps(Monitoring(wandb="tests"), run, 4, 5)
    assert (run / "wandb-id").read_text() == own
    runs = sorted((run / "wandb").glob("offline-run-*"))
    assert len(runs) == 2 and all(path.name.endswith(own) for path in runs)
    logged = b"".join(path.read_bytes() for folder in runs for path in folder.glob("*.wandb"))
    assert b"step/loss" in logged and b"evaluation/loss" in logged and b"tests" in logged


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "find_spec", lambda _: None)
    Monitoring(profile=1).check_packages()
    for options, name in ((Monitoring(tensorboard=True), "tensorboard"), (Monitoring(wandb="p"), "wandb")):
        with pytest.raises(UserError, match=rf"needs the package {name}\ninstall it: pip install 'megaloom\[{name}\]'"):
            options.check_packages()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text(json.dumps({}))
    with (
        pytest.raises(UserError, match=r"cannot write into .*\ngive another --tensorboard-dir"),
        open_trackers(Monitoring(tensorboard_dir=tmp_path / "file" / "x"), tmp_path, done=0, options={}),
    ):
        pass
