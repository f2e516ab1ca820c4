"""Calibration finds the figures of a device and its links with which the cost model reproduces measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from megaloom.planner.contract.devices import Cluster
from megaloom.planner.cost import communication
from megaloom.planner.hardware.calibration import (
    COLLECTIVE_KINDS,
    Sample,
    calibration_table,
    fitted_figures,
    predicted_seconds,
    profile_text,
)
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.runtime.calibrate import measure
from megaloom.runtime.cli.main import main
from megaloom.runtime.launch import launcher
from tests.support.limits import LIMIT

DONE = (
    *(
        Sample(kind="product", precision=p, shape=(8192, 8192, k), seconds=1)
        for p in ("bf16", "fp8")
        for k in (4096, 128)
    ),
    Sample(kind="attention", precision="bf16", shape=(32, 4096, 128), seconds=1),
    Sample(kind="copy", nbytes=2**31, seconds=1),
    Sample(kind="launch", seconds=1),
    *(
        Sample(kind=kind, nbytes=nbytes, devices=devices, stride=stride, seconds=1)
        for kind in ("send", *COLLECTIVE_KINDS)
        for nbytes in (4, 2**30)
        for devices, stride in ((2, 1), (4, 1), (8, 1), (2, 8), (3, 8), (4, 8))
    ),
)


def as_measured(machine: Cluster) -> tuple[Sample, ...]:
    """Return the samples as this cluster would have measured them."""
    can = (s for s in DONE if s.precision in ("", *machine.device.flops) and s.devices * s.stride <= machine.count)
    return tuple(evolve(s, seconds=predicted_seconds(s, machine)) for s in can)


@settings(max_examples=15)
@given(
    flops=st.floats(0.3, 1),
    narrow=st.floats(0.5, 1),
    moves=st.floats(0.3, 1),
    attend=st.floats(0.2, 0.9),
    launch=st.floats(1e-6, 2e-5),
    efficiency=st.floats(0.3, 1),
    latency=st.floats(2e-6, 5e-5),
    hop=st.floats(1e-6, 2e-5),
)
def test_the_figures_of_a_machine_are_found_again(
    flops: float,
    narrow: float,
    moves: float,
    attend: float,
    launch: float,
    efficiency: float,
    latency: float,
    hop: float,
) -> None:
    preset = cluster("16xH100")
    device = evolve(
        preset.device,
        flops_efficiency=flops,
        narrow_efficiency=narrow,
        bandwidth_efficiency=moves,
        attend_efficiency=attend,
        launch_seconds=launch,
    )
    links = {
        "intra": evolve(preset.intra, efficiency=efficiency, latency=latency, hop=hop),
        "inter": evolve(preset.inter, efficiency=efficiency / 2, latency=2 * latency, hop=hop),
    }
    result = fitted_figures(as_measured(evolve(preset, device=device, **links)), preset, known=True)
    for name, value in result["device"].items():
        assert value == pytest.approx(getattr(device, name), rel=0.03)
    for part, link in links.items():
        for name, value in result[part].items():
            assert value == pytest.approx(getattr(link, name), rel=0.03)


@pytest.mark.parametrize("kinds", [COLLECTIVE_KINDS, ("all_to_all",), ("all_reduce", "all_gather")])
@pytest.mark.parametrize("priced", ["collective_seconds", "level_seconds"])
@pytest.mark.parametrize("factor", [0.7, 1.3])
def test_links_are_found_by_the_price_of_a_collective_as_it_is(
    priced: str, kinds: tuple[str, ...], factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collectives, or their bytes alone, are priced higher or lower: the links that explain the samples stay."""
    price = getattr(communication, priced)

    def changed(kind: str, *args: Any) -> Any:
        times = factor if kind in kinds else 1.0
        result = price(kind, *args)
        return tuple(times * x for x in result) if isinstance(result, tuple) else times * result

    monkeypatch.setattr(communication, priced, changed)
    preset = cluster("32xH100")
    links = {
        "intra": evolve(preset.intra, efficiency=0.6, latency=9e-6, hop=2e-6),
        "inter": evolve(preset.inter, efficiency=0.5, latency=2e-5, hop=5e-6),
    }
    result = fitted_figures(as_measured(evolve(preset, **links)), preset, known=True)
    for part, link in links.items():
        for name, value in result[part].items():
            assert value == pytest.approx(getattr(link, name), rel=0.02), (part, name)


def test_of_an_unknown_device_what_is_reached_is_the_peak(tmp_path: Path) -> None:
    base, h100 = cluster("16xA100"), cluster("16xH100")
    machine = evolve(h100, device=evolve(h100.device, sustained=1.0))
    samples = [s for s in as_measured(machine) if s.precision != "fp8"]
    path = tmp_path / "unknown.json"
    path.write_text(
        profile_text(samples, fitted_figures(samples, base, known=False), "A100", "L99", 16, {"date": "today"})
    )
    result = cluster(str(path))
    assert result.device.name == "L99"
    assert result.device.flops["bf16"] == pytest.approx(machine.device.flops["bf16"] * 0.8, rel=0.1)
    for s in samples:
        if s.nbytes != 4:
            assert predicted_seconds(s, result) == pytest.approx(s.seconds, rel=0.25), s


def test_a_busy_machine_makes_a_profile_too(tmp_path: Path) -> None:
    """Copies are slower than messages, as when other processes take the cores."""
    preset = cluster("4xCPU")
    slow = [evolve(s, seconds=1e3 if s.kind == "copy" else s.seconds) for s in as_measured(preset)]
    path = tmp_path / "busy.json"
    path.write_text(profile_text(slow, fitted_figures(slow, preset, known=False), "CPU", "CPU", 4, {}))
    assert cluster(str(path)).inter.bandwidth <= cluster(str(path)).device.bandwidth


def test_what_is_shown() -> None:
    machine = cluster("8xH100")
    shown = calibration_table(as_measured(machine)[:2], machine, machine)
    assert [next(iter(c.cells)).plain for c in shown.columns][:5] == [
        "product",
        "bf16 8192 x 8192 x 4096",
        "1",
        "744.3",
        "TFLOP/s",
    ]


def across() -> list[Sample]:
    return list(measure._collectives(2, 2, series=0.0))


def test_groups_within_nodes_and_across() -> None:
    assert list(measure._groups(1, 1)) == []
    assert list(measure._groups(4, 4)) == [(2, 1), (4, 1)]
    assert list(measure._groups(12, 6)) == [(2, 1), (6, 1), (2, 6)]
    for results in launcher.run(across, (), 4, timeout=LIMIT):
        assert {(s.devices, s.stride) for s in results} == {(2, 2)}


def test_measuring_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two processes, each thing once: what matters is that it can be planned by."""
    monkeypatch.setattr(measure, "SERIES_SECONDS", 0.0)
    monkeypatch.setattr(measure, "SERIES", 1)
    monkeypatch.chdir(tmp_path)
    assert main(["measure", "--gpus", "2"]) == 0
    output = capfd.readouterr().out
    assert "wrote profile.json. Next: `plan MODEL --gpus profile.json`" in output
    written = json.loads(Path("profile.json").read_text())
    assert {s["kind"] for s in written["measured"]} == {
        "product",
        "attention",
        "copy",
        "launch",
        "send",
        *COLLECTIVE_KINDS,
    }
    assert written["software"]["torch"]
    result = cluster("profile.json")
    assert (result.count, result.device.name) == (2, "CPU")
    assert all(s["seconds"] > 0 for s in written["measured"])
    assert (
        main(["plan", "stdlib-gpt", "--gpus", "profile.json", "--seq", "128", "--batch", "8", "--precision", "fp32"])
        == 0
    )
    assert main(["measure", "--gpus", "0"]) == 2
    for wrong in ("none/p.json", "p.txt"):
        assert main(["measure", "--gpus", "2", "-o", wrong]) == 2
        assert f"cannot write a profile to {wrong}" in capfd.readouterr().err
