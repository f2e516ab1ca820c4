"""Logs to a cluster file: what is read, the report, what plans take from the file, and bad inputs."""

from __future__ import annotations

import re
import shutil
import tomllib
from functools import cache
from pathlib import Path

import pytest
from attrs import evolve

from megaloom.dsl import UserError, graph
from megaloom.planner.calibrate.calibrated import CalibratedRuns, calibrated
from megaloom.planner.calibrate.cluster_toml import calibrated_toml
from megaloom.planner.calibrate.logs import LoggedRun, read_logs
from megaloom.planner.cli.run_options import NO_RUN
from megaloom.planner.cli.second_opinion import cluster_of
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plan_json import plan_from_json, plan_to_json
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.runs.iterations import (
    LogProgram,
    MaxAllocated,
    allocated_ratio,
    iterations_of,
    max_allocated,
    measured_step,
)
from megaloom.planner.runs.opinion import second_opinion
from megaloom.planner.runs.read import read_file
from megaloom.planner.runs.run import Measured
from megaloom.planner.search.pricing import price
from megaloom.runtime.cli.main import main
from tests.support.paths import TESTS
from tests.support.published_logs import LOGS, logs

NAMES = sorted(logs())
TITAN = """\
[rank0]:[titan] 2026-01-01 10:00:00,000 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss: 12.2  \
\x1b[38;2;180;60;0mmemory: 27.34GiB(28.78%)  \x1b[34mtps: {tps:,}  tflops: 21.7  mfu: 2.20%\x1b[39m
"""
NEMO = """\
retraining/0 Training epoch 0, iteration {step}/99 | lr: 9.8e-08 | global_batch_size: 128 | global_step: {step} | \
reduced_train_loss: 14.66 | train_step_timing in s: {seconds} | consumed_samples: 8
"""
TOML = """\
[model]
name = "llama3"
flavor = "8B"
[training]
seq_len = 8192
local_batch_size = 1
[activation_checkpoint]
mode = "none"
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = {tp}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the published logs, which is the current one."""
    for path in LOGS.glob("*.log"):
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@cache
def published() -> CalibratedRuns:
    """Return the calibration of the published logs."""
    return calibrated([one.observed for one in read(*(str(LOGS / name) for name in NAMES))])


def read(*names: str, gpus: str = "B200") -> tuple[LoggedRun, ...]:
    return read_logs(names, NO_RUN.given((), gpus, ()), lambda run: cluster_of(run, gpus.rpartition("x")[2]))


def test_the_logs_are_those_of_the_published_records() -> None:
    assert {path.name: path.read_text() for path in LOGS.glob("*.log")} == logs()


def test_the_report(folder: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> None:
    assert main(["calibrate", *NAMES, "--gpus", "B200", "-o", "ours.toml"]) == 0
    text, golden = capsys.readouterr().out, TESTS / "golden" / "calibration.txt"
    if request.config.getoption("--update"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert all(line == line.rstrip() and len(line) <= 120 for line in text.splitlines())


def test_plans_take_figures_and_interval_from_the_file(folder: Path) -> None:
    found = published()
    text = calibrated_toml(found, cluster("B200"), "megaloom calibrate")
    (folder / "ours.toml").write_text(text)
    machine = cluster("8xours.toml")
    assert machine.calibration == found.calibration and text.startswith("# Calibrated from 8 runs: megaloom calibrate")
    assert [Path(row["log"]).name for row in tomllib.loads(text)["measured"]] == NAMES
    for run, after in zip(found.runs, found.after, strict=True):
        assert run.seconds_on(machine) / run.seconds == pytest.approx(after, rel=1e-4)
    run = read_file(NAMES[0], NO_RUN.given((), None, ()))
    plan = second_opinion(run, machine).plan
    assert plan is not None and machine.calibration is not None
    step = plan.predicted.step_seconds
    assert plan.predicted.interval == pytest.approx([end * step for end in machine.calibration.step])
    assert plan_from_json(plan_to_json(plan), "plan.json") == plan


def test_the_interval_holds_for_the_program_and_class_of_the_runs_only(folder: Path) -> None:
    found = published()
    machine = found.cluster(cluster("8xB200"))
    plain = evolve(machine, calibration=None)
    assert machine.calibration is not None
    other = evolve(machine, calibration=evolve(machine.calibration, classes=("experts",)))
    run = read_file(NAMES[0], NO_RUN.given((), None, ()))
    ours, plainly, unlike = (second_opinion(run, each).plan for each in (machine, plain, other))
    assert ours is not None and plainly is not None and unlike is not None
    assert ours.predicted.interval != plainly.predicted.interval == unlike.predicted.interval
    own = (price(graph(run.model), run.layout, each, run.workload).prediction.interval for each in (machine, plain))
    assert len(set(own)) == 1  # of Megaloom's own runtime


def test_a_calibrated_file_is_calibrated_again_from_its_own_figures(folder: Path) -> None:
    argv = ["calibrate", *NAMES, "--gpus"]
    assert main([*argv, "B200", "-o", "ours.toml"]) == main([*argv, "ours.toml", "-o", "again.toml"]) == 0
    first, again = (cluster(f"8x{name}") for name in ("ours.toml", "again.toml"))
    assert again.device.flops_efficiency == pytest.approx(first.device.flops_efficiency, rel=0.02)
    assert again.calibration is not None and again.calibration.runs == 8


def test_logs_of_torchtitan_and_nemo_are_read_beside_their_run_files(folder: Path) -> None:
    for tp, tps in ((1, 7000), (2, 6500)):
        Path(f"tp{tp}.toml").write_text(TOML.format(tp=tp))
        Path(f"tp{tp}.log").write_text("".join(TITAN.format(step=n, tps=375 if n == 1 else tps) for n in range(1, 12)))
    one, two = read("tp1.toml=tp1.log", "tp2.toml=tp2.log", gpus="8xH100")
    assert (one.run.layout.tp, two.run.layout.tp) == (1, 2)
    assert one.measured.seconds == pytest.approx(8192 / 7000)
    assert two.measured.seconds == pytest.approx(8192 / 2 / 6500)
    assert one.measured.iterations == 8
    Path("nemo.log").write_text("".join(NEMO.format(step=n, seconds=12.2 if n else 40.0) for n in range(9)))
    program, printed = iterations_of(Path("nemo.log").read_text().splitlines())
    assert program is LogProgram.NEMO and [each.seconds for each in printed] == [40.0, *[12.2] * 8]
    assert printed[0].batch == 128


def test_iterations_of_another_batch_do_not_count() -> None:
    lines = [NEMO.format(step=n, seconds=1.0 + n) for n in range(5)]
    lines += [line.replace("size: 128", "size: 256") for line in (NEMO.format(step=n, seconds=9.0) for n in (5, 6))]
    measured = measured_step(iterations_of(lines)[1], None, "run.log", 256)
    assert measured is not None and measured.seconds == 9.0
    assert measured.left_out[0] == "5 intervals with another batch than 256"
    assert measured_step(iterations_of(lines)[1], None, "run.log", 64) is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([NAMES[0]], "calibration needs the logs of at least 2 runs, got 1"),
        ([], "calibration needs the logs of at least 2 runs, got 0"),
        ([NAMES[0], NAMES[0]], f"{NAMES[0]} is given twice"),
        ([NAMES[0], "missing.log"], "cannot read missing.log: No such file or directory"),
        ([NAMES[0], "no.log"], "no.log has no iterations that are understood"),
        ([NAMES[0], "text.bin"], "text.bin has no iterations that are understood"),
        ([NAMES[0], "titan.log"], "titan.log is a log of torchtitan, which does not state its model and layout"),
        ([NAMES[0], "vocab.log"], "vocab.log: the vocabulary is not stated"),
        ([NAMES[0], "h100.log"], "h100.log ran on H100, not on B200"),
        ([NAMES[0], "illegal.log"], "illegal.log: "),
        ([NAMES[0], "batch.log"], "batch.log has no iterations with the run's batch of 8"),
    ],
)
def test_bad_logs_get_one_sentence(
    folder: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(NAMES[1]).read_text()
    Path("no.log").write_text("".join(line for line in text.splitlines(True) if "iteration " not in line))
    Path("text.bin").write_bytes(bytes(range(256)))
    Path("titan.log").write_text("".join(TITAN.format(step=n, tps=700) for n in range(1, 12)))
    Path("h100.log").write_text("| 0  NVIDIA H100 80GB HBM3 On |\n" + text)
    Path("vocab.log").write_text("".join(line for line in text.splitlines(True) if "vocab_size" not in line))
    Path("illegal.log").write_text(re.sub(r"(seq_length \.+) 4096", r"\1 4095", text))
    Path("batch.log").write_text(re.sub(r"(global_batch_size \.+) 16", r"\1 8", text))
    assert main(["calibrate", *argv, "--gpus", "B200", "-o", "ours.toml"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"megaloom: {message}") and "Traceback" not in captured.err and not captured.out
    assert not Path("ours.toml").exists()


def test_logs_of_nodes_of_different_sizes_are_refused(folder: Path) -> None:
    flags = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
    flags += "--micro-batch-size 1 --global-batch-size 32 --vocab-size 512 --bf16"
    iteration = next(line for line in Path(NAMES[0]).read_text().splitlines() if "iteration " in line)
    for name, each, nodes in (("four", 4, 4), ("eight", 8, 2)):
        Path(f"{name}.sh").write_text(f"torchrun --nnodes {nodes} --nproc-per-node {each} pretrain_gpt.py {flags}\n")
        Path(f"{name}.log").write_text(iteration.replace("size:    16", "size:    32") + "\n")
    with pytest.raises(UserError, match=r"four\.log ran on nodes of 4 GPUs, eight\.log on nodes of 8"):
        read("four.sh=four.log", "eight.sh=eight.log", gpus="H100")


def test_the_output_must_be_a_toml_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *NAMES[:2], "--gpus", "B200", "-o", "ours.json"]) == 2
    assert "-o must be a file that ends in .toml, got 'ours.json'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("runs = 1", "calibration.runs must be a number of at least 2 runs, got 1"),
        ("step = [1.2, 0.9]", "is not plausible"),
        ("step = [1.05, 1.2]", "is not plausible"),
        ("step = [0.9]", "has a wrong calibration: step"),
        ('runs = "many"', "has a wrong calibration: runs must be a whole number"),
        ("more = 1", "has an unknown field 'more'"),
    ],
)
def test_a_wrong_calibration_is_refused(wrong: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    right = {"runs": "runs = 4", "classes": 'classes = ["experts"]', "step": "step = [0.9, 1.1]"}
    lines = {**right, wrong.partition(" ")[0]: wrong}
    path.write_text('base = "H100"\n[calibration]\n' + "\n".join(lines.values()) + "\n")
    with pytest.raises(UserError, match=r"ours\.toml") as error:
        cluster(f"8x{path}")
    assert message in str(error.value)


def test_the_help_names_logs_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    main(["calibrate", "--help"])
    text = capsys.readouterr().out
    for word in ("RUN=LOG", "--gpus", "--output", "--env", "--vocab", "--version-of", "--ignore-flag"):
        assert word in text


def test_memory_is_compared_on_the_pipeline_rank_that_reports_it() -> None:
    lines = [
        "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: 90.0 | reserved: 1 |",
        "[default6]:[Rank 6] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: 120.0 | reserved: 1 |",
        "memory (MB) | allocated: 1.0 | max allocated: 100.0",
    ]
    most = max_allocated(lines)
    assert most == MaxAllocated(120 * 2**20, 6, by_rank=((0, 90 * 2**20), (6, 120 * 2**20)))
    assert max_allocated(lines[2:]) == MaxAllocated(100 * 2**20)
    assert max_allocated(["memory"]) is None
    ranks = [{"weights": 200 * 2**20, "allocator": 2**30}, {"weights": 100 * 2**20}]
    layout = Layout(dp=2, tp=2, pp=2)
    assert allocated_ratio(Measured(1.0, nbytes=120 * 2**20, rank=6), layout, ranks) == pytest.approx(1.2)
    assert allocated_ratio(Measured(1.0, nbytes=120 * 2**20, rank=3), layout, ranks) == pytest.approx(0.6)
    assert allocated_ratio(Measured(1.0, nbytes=120 * 2**20), layout, ranks) == pytest.approx(0.6)
    assert allocated_ratio(Measured(1.0), layout, ranks) is None
