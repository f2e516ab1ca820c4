"""The trace of a measured step: units of the schedule, the prediction's names, and the comparison with it."""

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megaloom.dsl import UserError, graph
from megaloom.planner.contract.choices import OverlapSet, Recompute, Shard
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.cost.columns import STEP_COLUMNS
from megaloom.planner.report.chrome_trace import replay, trace_json
from megaloom.planner.report.measured.measured_step import (
    KINDS,
    WAITING,
    MeasuredTrace,
    read_trace,
    seconds_of_plan,
    seconds_of_trace,
    with_prediction,
)
from megaloom.planner.report.measured.step_comparison import by_layer
from megaloom.runtime.cli.main import main
from megaloom.runtime.metrics.metrics_file import read_metrics
from megaloom.runtime.metrics.monitoring import Monitoring
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.training.run import train
from megaloom.runtime.training.training_run import Summary
from tests.support.models.examples import model_named
from tests.support.paths import ROOT

LAYOUT = Layout(
    pp=2,
    vpp=2,
    dp=2,
    recompute=Recompute.FULL,
    recompute_layers=1,
    shard=Shard.OPTIMIZER,
    overlaps=OverlapSet(),
)
MICROBATCHES = 4


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory, plan_of: Any) -> tuple[Path, Plan, Summary]:
    """A run folder whose step 3 was profiled, its plan, and its summary."""
    folder = tmp_path_factory.mktemp("profiled") / "run"
    plan = plan_of("stdlib-gpt(layers=8, embed=32, ff=64)", LAYOUT, batch=8)
    recipe, monitoring = Recipe(steps=3), Monitoring(profile=3, tensorboard=True)
    return folder, plan, train(plan, recipe, folder=folder, source=str(ROOT / "docs" / "guide"), monitoring=monitoring)


@pytest.fixture(scope="module")
def trace(profiled: tuple[Path, Plan, Summary]) -> MeasuredTrace:
    assert profiled[2].trace == profiled[0] / "trace-step-000003.json.gz"
    return read_trace(profiled[2].trace)


def slices(trace: MeasuredTrace, rank: int, category: str) -> list[dict[str, Any]]:
    return [dict(e) for e in trace.events if e["ph"] == "X" and e["pid"] == rank and e["cat"] == category]


def test_each_rank_runs_the_passes_of_the_schedule(trace: MeasuredTrace, profiled: tuple[Path, Plan, Summary]) -> None:
    plan = profiled[1]
    g = graph(model_named(plan.model))
    predicted = [e for e in json.loads(trace_json(plan, replay(plan, g), g))["traceEvents"] if e["ph"] == "X"]
    for rank, pipeline_rank in enumerate(trace.about["pipeline_ranks"]):
        ours = [(e["name"], e["args"]) for e in slices(trace, rank, "step") if "stage" in e["args"]]
        theirs = [(e["name"], e["args"]) for e in predicted if e["pid"] == pipeline_rank and "stage" in e["args"]]
        assert ours == theirs
        names = {e["name"] for e in slices(trace, rank, "step")}
        expected = {e["name"] for e in predicted if e["pid"] == pipeline_rank}
        assert expected >= {"gradient reduction", "tied gradients", "optimizer", "weight gather", "send activation"}
        assert names - expected <= {"step", "gradient norm", "receive activation", "receive gradient"}
        assert expected <= names


def test_units_of_a_rank_do_not_overlap(trace: MeasuredTrace) -> None:
    for rank in range(LAYOUT.world):
        computing = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices(trace, rank, "step") if e["name"] in KINDS)
        assert all(start >= end - 0.01 for (_, end), (start, _) in pairwise(computing))
        whole = next(e for e in slices(trace, rank, "step") if e["name"] == "step")
        assert all(0 <= start and end <= whole["ts"] + whole["dur"] + 0.01 for start, end in computing)


def test_each_node_runs_inside_its_passes(trace: MeasuredTrace, profiled: tuple[Path, Plan, Summary]) -> None:
    """Forward and backward for each micro-batch of its stage; those of the first block are recomputed."""
    plan = profiled[1]
    g = graph(model_named(plan.model))
    first_blocks = {next(n.block for n in g.nodes[s.start : s.stop] if n.block is not None) for s in plan.stages}
    for rank, pipeline_rank in enumerate(trace.about["pipeline_ranks"]):
        nodes = slices(trace, rank, "node")
        passes = {(e["name"], e["args"]["stage"], e["args"]["microbatch"]): e for e in slices(trace, rank, "step")
                  if "stage" in e["args"]}  # fmt: skip
        for e in nodes:
            what = "forward" if e["args"]["pass"] == "forward" else "backward"
            outer = passes[what, e["args"]["stage"], e["args"]["microbatch"]]
            assert outer["ts"] - 0.01 <= e["ts"] and e["ts"] + e["dur"] <= outer["ts"] + outer["dur"] + 0.01
        counts = Counter((e["name"], e["args"]["pass"]) for e in nodes)
        own = [n for s in plan.stages if s.rank == pipeline_rank for n in g.nodes[s.start : s.stop] if n.inputs]
        for n in own:
            assert counts[n.name, "forward"] == MICROBATCHES
            assert counts[n.name, "backward"] in (0, MICROBATCHES)
            assert counts[n.name, "recompute"] == (MICROBATCHES if n.block in first_blocks else 0)


def test_seconds_add_up_and_have_the_predictions_parts(
    trace: MeasuredTrace, profiled: tuple[Path, Plan, Summary]
) -> None:
    plan = profiled[1]
    g = graph(model_named(plan.model))
    priced = replay(plan, g)
    measured, predicted = seconds_of_trace(trace), seconds_of_plan(plan, priced, g)
    for one in (measured, predicted):
        assert len(one.kinds) == LAYOUT.pp
        assert all(sum(kinds.values()) == pytest.approx(one.step) for kinds in one.kinds)
        assert all({*kinds} == {*KINDS, WAITING} for kinds in one.kinds)
    passes = sum(rank["forward"] + rank["backward"] for rank in predicted.kinds)
    assert sum(predicted.nodes.values()) == pytest.approx(passes, rel=0.3)  # partial recompute is not in its rows
    rows = priced.partition.problem.table.by_node[:, STEP_COLUMNS]
    assert sum(predicted.nodes.values()) == pytest.approx(MICROBATCHES * rows.sum())
    (loss,) = (n.name for n in g.nodes if n.is_loss)
    assert predicted.nodes[loss] > 0 and measured.nodes[loss] > 0
    layers = by_layer(measured, predicted, priced, g)
    assert sum(row.measured for row in layers) == pytest.approx(sum(measured.nodes.values()))
    forward = [rank["forward"] for rank in measured.kinds]
    assert 0 < sum(measured.nodes.values()) <= sum(forward) + sum(rank["backward"] for rank in measured.kinds)


def test_both_steps_are_in_one_file(trace: MeasuredTrace, profiled: tuple[Path, Plan, Summary]) -> None:
    plan = profiled[1]
    g = graph(model_named(plan.model))
    merged = json.loads(with_prediction(trace, plan, replay(plan, g), g))
    names = {e["args"]["name"] for e in merged["traceEvents"] if e["name"] == "process_name"}
    assert names == {
        *(f"rank {rank} (pipeline rank {rank // 2})" for rank in range(4)),
        "predicted pipeline rank 0",
        "predicted pipeline rank 1",
    }
    by_side: dict[bool, set[str]] = {True: set(), False: set()}
    for e in merged["traceEvents"]:
        if e["ph"] == "X" and e["cat"] == "node":
            by_side[e["pid"] < 4].add(e["name"])
    assert by_side[True] <= by_side[False] == {n.name for n in g.nodes}


def test_compare_prints_where_they_differ(
    profiled: tuple[Path, Plan, Summary], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, plan, summary = profiled
    assert len(summary.stage_times) == 4 and all(
        s.forward_seconds > 0 < s.backward_seconds for s in summary.stage_times
    )
    assert main(["compare", str(folder)]) == 0
    shown = capsys.readouterr().out
    for text in ("kind of work", "waiting and sends", "Pipeline ranks", "attention.0 and 7 like it"):
        assert text in shown
    assert main(["compare", str(folder / "plan.json"), str(summary.trace), "--json"]) == 0
    raw = json.loads(capsys.readouterr().out)
    assert raw["predicted_step_seconds"] == pytest.approx(plan.predicted.step_seconds)
    sizes = [abs(row["measured_seconds"] - row["predicted_seconds"]) for row in raw["layers"]]
    assert sizes == sorted(sizes, reverse=True)
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b"[]"))
    for args, says in (
        ([str(folder), str(tmp_path / "a.json")], "a.json is not the trace of a measured step"),
        ([str(folder), str(tmp_path / "a.json.gz")], "a.json.gz is not the trace of a measured step"),
        ([str(folder), str(folder / "plan.json")], "plan.json is not the trace"),
        ([str(folder), "none.json"], "cannot read a trace from none.json: No such file"),
        ([str(folder / "data")], "cannot read a plan from"),
    ):
        assert main(["compare", *args]) == 2
        assert says in capsys.readouterr().err


def test_a_step_that_the_run_does_not_do_is_refused(profiled: tuple[Path, Plan, Summary]) -> None:
    folder, plan, _ = profiled
    for step in (0, 3, 5):
        says = rf"--profile {step} is not a step of this run, which has done 3 steps\ngive a step from 4 to 4"
        with pytest.raises(UserError, match=says):
            train(plan, Recipe(steps=4), folder=folder, monitoring=Monitoring(profile=step))
    with pytest.raises(UserError, match="give more --steps than 3"):
        train(plan, Recipe(steps=3), folder=folder, monitoring=Monitoring(profile=4))


def test_trackers_have_the_steps(profiled: tuple[Path, Plan, Summary]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(profiled[0] / "tensorboard")).Reload()
    losses = [e["loss"] for e in read_metrics(profiled[0] / "metrics.jsonl") if e["event"] == "step"]
    assert [p.value for p in shown.Scalars("step/loss")] == pytest.approx(losses)
    assert {"step/mfu", "step/peak_nbytes", "step/lr", "evaluation/loss"} <= set(shown.Tags()["scalars"])
