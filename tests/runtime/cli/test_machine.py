"""The machine that `megaloom train` plans for: measured once, kept, and named where a run disappoints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.cli.arguments import SEARCH_ALL, FixedLayout
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.search.infeasible import NoLegalLayoutError
from megaloom.runtime.calibrate.measure import Measurements, Scope, brief, measure_devices
from megaloom.runtime.cli import devices, machine, outside
from megaloom.runtime.cli.commands.train_command import devices_option
from megaloom.runtime.megatron import host

SCOPE = Scope(1e-4, ((torch.float32, 64, 64, 64),), 1, all_groups=False)


@pytest.fixture(scope="module")
def measured() -> Measurements:
    """Two processes, measured for an instant."""
    return measure_devices(2, SCOPE)


@pytest.fixture
def calls(measured: Measurements, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Scope]]:
    """The measurements that are asked for, on an idle machine of two cores with an empty cache."""
    asked: list[tuple[int, Scope]] = []

    def measure(count: int, scope: Scope) -> Measurements:
        asked.append((count, scope))
        return evolve(measured, count=count, per_node=count)

    monkeypatch.delenv(machine.MACHINE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "measure_devices", measure)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))
    for module in (machine, devices, outside):
        monkeypatch.setattr(module, "usable_cores", lambda: 2)
    return asked


def test_a_measurement_has_all_figures_of_a_cluster(measured: Measurements) -> None:
    kinds = {sample.kind for sample in measured.samples}
    assert kinds == {
        *("product", "attention", "copy", "launch", "send"),
        *("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    }
    assert (measured.count, measured.per_node) == (2, 2)
    assert measured.nbytes == host.host_memory() // 2


def test_cpus_are_measured_in_16_bits_for_fp8(calls: list[tuple[int, Scope]]) -> None:
    """The plan refuses fp8 for them then."""
    machine.this_machine(2, Precision.FP8)
    ((_, scope),) = calls
    assert scope.products is not None and {dtype for dtype, *_ in scope.products} == {torch.float32, torch.bfloat16}


def test_what_is_measured_briefly() -> None:
    assert {dtype for dtype, *_ in brief("fp32", shared=False).products or ()} == {torch.float32}
    assert {dtype for dtype, *_ in brief("bf16", shared=False).products or ()} == {torch.float32, torch.bfloat16}
    assert brief("fp32", shared=True).seconds > brief("fp32", shared=False).seconds


def test_the_machine_is_measured_once(
    calls: list[tuple[int, Scope]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = machine.this_machine(None, "fp32")
    said = capsys.readouterr().out
    assert said.startswith("measured this machine: 2 processes of 1 thread, ")
    assert str(first) == "2xCPU"
    assert first != cluster("2xCPU")
    assert machine.this_machine(2, "fp32") == first == machine.kept(2, "fp32")
    assert "(kept from an earlier run)" in capsys.readouterr().out
    assert [count for count, _ in calls] == [2]
    machine.this_machine(1, "fp32")  # with more threads
    machine.this_machine(2, "bf16")
    assert [count for count, _ in calls] == [2, 1, 2]
    (file, *_) = (tmp_path / "cache" / "megaloom").glob("cpu-2x1-fp32-*.json")
    file.write_text("{")
    assert machine.this_machine(2, "fp32") == first  # measured again
    assert len(calls) == 4


def test_a_busy_machine_is_measured_again_and_a_full_cache_is_said(
    calls: list[tuple[int, Scope]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (7.1, 0.0, 0.0))
    machine.this_machine(None, "fp32")
    assert "not kept, because other programs are running: load 7.1 on 2 cores)" in capsys.readouterr().out
    assert machine.kept(2, "fp32") is None
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    (tmp_path / "cache").write_text("a file")
    machine.this_machine(None, "fp32")
    assert "cannot keep the measurement of this machine in" in capsys.readouterr().out
    assert len(calls) == 2


def test_a_cluster_may_stand_for_the_machine(calls: list[tuple[int, Scope]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.MACHINE, "4xCPU")
    assert machine.this_machine(None, "fp32") == cluster("4xCPU")
    assert machine.this_machine(2, "fp32") == cluster("2xCPU")
    with pytest.raises(UserError, match="5000 ranks are too many"):
        machine.this_machine(5000, "fp32")
    assert not calls


@pytest.mark.parametrize(
    ("cores", "fixed", "legal", "tried"),
    [
        (2, SEARCH_ALL, {1, 2}, [2]),
        (13, SEARCH_ALL, {1, 2, 4, 8, 12}, [13, 12, 12]),
        (2, FixedLayout(tp=2, pp=2), {4}, [4]),
        (7, FixedLayout(tp=3), {6}, [6]),
    ],
)
def test_the_default_number_of_processes(
    cores: int, fixed: FixedLayout, legal: set[int], tried: list[int], calls: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as cores, or the next smaller number with a legal layout; a multiple of the degrees that are given."""
    seen = []

    def make(where: object) -> object:
        seen.append(where.count)  # type: ignore[attr-defined]
        if seen[-1] not in legal:
            raise NoLegalLayoutError("no layout")
        return type("Found", (), {"best": seen[-1]})

    for module in (machine, devices):
        monkeypatch.setattr(module, "usable_cores", lambda: cores)
    assert devices.make_plan(make, None, fixed, None, Precision.FP32) == tried[-1]  # type: ignore[arg-type]
    assert seen == tried


def test_no_legal_number_of_processes(calls: object) -> None:
    def make(where: object) -> object:
        raise NoLegalLayoutError("no layout")

    with pytest.raises(NoLegalLayoutError):
        devices.make_plan(make, None, SEARCH_ALL, None, Precision.FP32)  # type: ignore[arg-type]


def test_advice_stays_within_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "most_ranks", lambda: 32)
    monkeypatch.setattr(devices, "host_memory", lambda: 16 * cluster("1xCPU").device.nbytes)
    assert devices_option(cluster("8xCPU")) == "--devices 8"
    assert [devices_option(cluster(f"{n}xCPU")) for n in (17, 64)] == [None, None]  # memory, cores
    assert devices_option(cluster("4xH100")) is None


def test_a_run_outside_its_interval_says_why(plan_of, calls: object, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("byte_llama", Layout(dp=4))
    low, high = plan.predicted.interval

    def said(seconds: float | None, steps: int = 30, busy: str = "", plan=plan) -> str:
        summary = type("Summary", (), {"step_seconds": seconds, "step": steps, "resumed": None, "seconds": 1.0})
        return outside.outside_text(plan, summary, busy)  # type: ignore[arg-type]

    assert said((low + high) / 2) == said(2 * high, steps=9) == said(None) == ""
    measures = "`megaloom train MODEL` without a plan measures this machine"
    preset = f"the plan has the figures of the preset 4xCPU, and {measures}"
    slow = said(2 * high, busy="load 7.1 on 2 cores")
    assert slow.startswith("slower than the 90% interval of the plan, ")
    assert slow.endswith(
        f": {preset}, and 4 processes share 2 cores, and other programs are running (load 7.1 on 2 cores)"
    )
    assert said(low / 2).endswith(f": {preset}")
    assert said(low / 2).startswith("faster than")
    own = evolve(plan, layout=Layout(dp=2), cluster=machine.this_machine(2, "fp32"))
    assert said(2 * high, plan=own).endswith("; --profile and `megaloom compare` show where")
    faster = evolve(own.cluster, device=evolve(own.cluster.device, launch_seconds=1e-3))
    assert "with other figures than those measured on this machine" in said(2 * high, plan=evolve(own, cluster=faster))
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    assert "other programs are running (load 3.0 on 2 cores)" in said(2 * high, plan=own)
    gpus = evolve(plan, cluster=cluster("4xH100"))
    assert said(2 * high, plan=gpus).endswith(": the plan is for 4xH100, and this machine has CPU")
