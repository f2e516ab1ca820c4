"""The trace of a plan has Chrome's format, and its times and bytes are those of the plan."""

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Graph, graph
from megaloom.planner.cli import main
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plan_json import load
from megaloom.planner.contract.plans import Plan, PlanError
from megaloom.planner.report.chrome_trace import (
    COMPUTE_THREAD,
    end_of_step_slices,
    replay,
    trace_json,
    write_file,
)
from megaloom.planner.simulate.memory_timeline import memory_levels, memory_tracks
from megaloom.planner.simulate.price import Priced

MICRO = 1e-3  # microseconds to which times are rounded
LAYOUTS = {
    "one": ("deep_llama", Layout()),
    "data": ("deep_llama", Layout(dp=4, shard="optimizer")),
    "tensor": ("deep_llama", Layout(tp=2, cp=2, sequence_parallel=True)),
    "pipeline": ("deep_llama", Layout(pp=4)),
    "tied": ("tiny_gpt", Layout(pp=2, dp=2)),
    "chunks": ("deep_llama", Layout(pp=2, vpp=4, dp=2, shard="optimizer")),
    "experts": ("tiny_mixtral", Layout(pp=2, dp=2, ep=2, recompute=Recompute.FULL)),
}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def planned(request: pytest.FixtureRequest, plan_of: Callable[..., Plan]) -> tuple[Plan, Graph]:
    name, layout = request.param
    plan = plan_of(name, layout, batch=16)
    return plan, graph(find(plan.model)[0])


def events(plan: Plan, g: Graph) -> list[dict[str, Any]]:
    return json.loads(trace_json(plan, replay(plan, g), g))["traceEvents"]


def slices(result: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Return the complete events by process and thread."""
    rows = defaultdict(list)
    for event in result:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    return rows


def end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


def test_events_are_of_the_format(planned: tuple[Plan, Graph]) -> None:
    """Complete events with times, counters with figures, and a name for each process and thread that has any."""
    plan, g = planned
    result = events(plan, g)
    named = {(e["pid"], e["tid"], e["name"]) for e in result if e["ph"] == "M"}
    assert {e["ph"] for e in result} == {"M", "X", "C"}
    for event in result:
        assert {"ph", "pid", "tid", "name", "args"} <= event.keys()
        assert (event["pid"], 0, "process_name") in named
        if event["ph"] == "X":
            assert (event["pid"], event["tid"], "thread_name") in named
            assert event["ts"] >= 0 and event["dur"] >= 0
        if event["ph"] == "C":
            assert event["ts"] >= 0 and all(type(n) is float for n in event["args"].values())
    assert {e["pid"] for e in result} == set(range(plan.layout.pp))


def test_nothing_on_a_thread_overlaps(planned: tuple[Plan, Graph]) -> None:
    """A viewer would take what overlaps for nested."""
    for row in slices(events(*planned)).values():
        assert all(end(a) <= b["ts"] + MICRO for a, b in pairwise(row))


def test_the_last_event_ends_with_the_step(planned: tuple[Plan, Graph]) -> None:
    plan, g = planned
    last = max(end(event) for row in slices(events(plan, g)).values() for event in row)
    assert last == pytest.approx(1e6 * plan.predicted.step_seconds, abs=2 * MICRO)


def test_the_busiest_rank_adds_up_to_the_breakdown(planned: tuple[Plan, Graph]) -> None:
    """The computation of the busiest rank, with its sends if it has one chunk, is the step less the bubble."""
    plan, g = planned
    busy: dict[int, float] = defaultdict(float)
    for (rank, thread), row in slices(events(plan, g)).items():
        if thread == COMPUTE_THREAD or plan.layout.vpp == 1:
            busy[rank] += sum(event["dur"] for event in row)
    bubble = plan.predicted.breakdown.get("pipeline bubble", 0.0)
    steps = 16 * 2 * plan.layout.vpp + 8  # each rounded to a thousandth
    assert max(busy.values()) / 1e6 == pytest.approx(plan.predicted.step_seconds - bubble, abs=2e-9 * steps)


def test_every_micro_batch_passes_every_stage(planned: tuple[Plan, Graph]) -> None:
    plan, g = planned
    m, stages = plan.layout.microbatches(plan.workload.batch), len(plan.stages)
    results = [e for row in slices(events(plan, g)).values() for e in row]
    for direction in ("forward", "backward"):
        passed = [(e["args"]["microbatch"], e["args"]["stage"]) for e in results if e["name"] == direction]
        assert sorted(passed) == [(i, s) for i in range(m) for s in range(stages)]
    sent = [e for e in results if e["name"].startswith("send")]
    assert len(sent) == (2 * m * (stages - 1) if plan.layout.pp > 1 else 0)


def test_memory_reaches_the_peak_of_the_plan(planned: tuple[Plan, Graph]) -> None:
    plan, g = planned
    priced = replay(plan, g)
    every = memory_tracks(priced)
    for rank, (steps, nbytes) in enumerate(zip(priced.timeline.events, plan.predicted.nbytes, strict=True)):
        track = list(memory_levels(every[rank], steps, end_of_step_slices(priced)[rank], plan.layout.pp))
        assert [time for time, _ in track] == sorted(time for time, _ in track)
        assert max(level for _, level in track) == sum(nbytes.values())
        assert track[0][1] == track[-1][1] <= sum(nbytes.values()) - nbytes["activations"]


def test_no_rank_updates_before_all_have_reduced(planned: tuple[Plan, Graph]) -> None:
    priced: Priced = replay(*planned)
    rows = end_of_step_slices(priced)
    reduced = max((it.end for row in rows for it in row if it.name not in ("optimizer", "weight gather")), default=0.0)
    for row in rows:
        assert all(it.start >= reduced for it in row if it.name == "optimizer")
        assert [it.name for it in row][-1] in ("optimizer", "weight gather")


def test_a_plan_of_other_costs_is_refused(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of("deep_llama", Layout(pp=2))
    other = evolve(plan, predicted=evolve(plan.predicted, step_seconds=1.0))
    with pytest.raises(PlanError, match=r"it predicts 1 s a step, this version .*\nplan again: plan "):
        replay(other, graph(find(plan.model)[0]))


def test_files(tmp_path: Path) -> None:
    write_file("text", str(tmp_path / "a.json"))
    write_file("text", str(tmp_path / "a.json.gz"))
    assert (tmp_path / "a.json").read_text() == "text"
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) == b"text"
    with pytest.raises(UserError, match=r"cannot write .*: Is a directory\ngive a file in a directory that exists"):
        write_file("text", str(tmp_path))


def test_the_command_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace, target = (str(tmp_path / name) for name in ("a.html", "a.json", "plan.json"))
    args = ("gpt2", "--gpus", "8xH100", "--batch", "64", "--trace", trace, "-o", target)
    assert main.main((*args, "--html", page)) == 0
    assert capsys.readouterr().out.endswith(f"\nwrote {page}\nwrote {trace}\n")
    plan = load(target)
    output = json.loads(Path(trace).read_text())["otherData"]
    assert output["layout"] == str(plan.layout) and output["step_seconds"] == plan.predicted.step_seconds
    assert f"<title>gpt2 on {plan.cluster}</title>" in Path(page).read_text()
    assert main.main((*args, "--html", str(tmp_path))) == 2
    assert capsys.readouterr().err.endswith("give another path, in a folder that exists\n")
