"""Names of clusters: the cluster of each, and refused names."""

from __future__ import annotations

import re

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.devices import Device, Link
from megaloom.planner.hardware.calibration import Sample, predicted_seconds
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.hardware.presets import PRESETS


@pytest.mark.parametrize(
    ("text", "count", "per_node", "name"),
    [
        ("64xH100", 64, 8, "H100"),
        ("8xh100", 8, 8, "H100"),
        ("H100", 1, 1, "H100"),
        ("8", 8, 8, "H100"),
        (" 3 x H200 ", 3, 3, "H200"),
        ("16\u00d7A100-80GB", 16, 8, "A100"),
        ("8xA100-40GB", 8, 8, "A100-40GB"),
        ("8xA100-SXM4-40GB", 8, 8, "A100-40GB"),
        ("8xA100-80GB-PCIe", 8, 8, "A100-PCIe"),
        ("8xA100-40GB-PCIe", 8, 8, "A100-PCIe-40GB"),
        ("8xH100-SXM", 8, 8, "H100"),
        ("72xGB200-NVL72", 72, 72, "GB200"),
        ("4xCPU", 4, 4, "CPU"),
        ("72xGB200", 72, 72, "GB200"),
        ("64xGB200", 64, 64, "GB200"),
        ("128xGB200", 128, 64, "GB200"),  # two racks of 72, filled evenly
        ("144xGB200", 144, 72, "GB200"),
    ],
)
def test_a_name_is_a_cluster(text: str, count: int, per_node: int, name: str) -> None:
    c = cluster(text)
    assert (c.count, c.per_node, c.device.name, str(c)) == (count, per_node, name, f"{count}x{name}")


@given(st.sampled_from(sorted(PRESETS)), st.integers(1, 3000))
def test_nodes_are_filled_evenly_or_what_would_is_said(name: str, count: int) -> None:
    try:
        c = cluster(f"{count}x{name}")
    except UserError as error:
        advice = re.fullmatch(r"use (\d+) or (\d+), or describe .* \(`per_node = (\d+)`\)", str(error).splitlines()[1])
        assert advice and count % int(advice[3]) == 0
        for suggestion in advice.groups()[:2]:
            assert str(cluster(f"{suggestion}x{name}")) == f"{suggestion}x{name}"
    else:
        assert c.nodes * c.per_node == count
        assert c.per_node <= PRESETS[name].domain


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8xH1000", "did you mean H100?"),
        ("8xQ7", f"known devices: {', '.join(PRESETS)}"),
        ("8xB200-80GB", "unknown device 'B200-80GB'"),
        ("8xH100-PCIe", "unknown device 'H100-PCIe'"),
        ("0xH100", "at least 1xH100"),
        ("-8xH100", "at least 1xH100"),
        ("12xH100", "use 8 or 16, or"),
        ("", "write 8xH100"),
        ("0", "at least 1xH100"),
        ("x", "unknown device 'x'"),
        ("8xH100xH100", "unknown device 'H100xH100'"),
        ("8.5xH100", "write 8xH100"),
    ],
)
def test_a_wrong_name_says_what_would_work(text: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        cluster(text)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_physical(name: str) -> None:
    preset = PRESETS[name]
    device = preset.device
    narrower = {precision: peak for precision, peak in device.flops.items() if precision != "fp32"}
    if name == "CPU":  # torch multiplies fp16 there without vector instructions
        assert narrower.pop("fp16") < device.flops["fp32"]
    assert device.flops["fp32"] <= min(narrower.values())
    assert preset.intra.bandwidth >= preset.inter.bandwidth
    assert preset.intra.bandwidth < device.bandwidth
    assert preset.domain % preset.tray == 0


def test_what_was_measured_is_what_the_figures_give() -> None:
    h200 = PRESETS["H200"]  # measured: 790 TFLOP/s, 4.3 TB/s, an all-reduce over four takes 25 us
    product = Sample(kind="product", precision="bf16", shape=(8192, 14336, 4096), seconds=0.0)
    assert product.amount / predicted_seconds(product, cluster("1xH200")) == pytest.approx(790e12, rel=0.015)
    assert h200.device.bandwidth * h200.device.bandwidth_efficiency == pytest.approx(4.3e12, rel=0.01)
    assert h200.intra.latency + 5 * h200.intra.hop == pytest.approx(25e-6, rel=0.05)


def test_the_implausible_is_refused() -> None:
    b200, nvlink = PRESETS["B200"].device, PRESETS["B200"].intra
    with pytest.raises(UserError, match=r"a B200 has 178\.3 GiB"):
        evolve(b200, nbytes=80 * 2**30)
    assert evolve(b200, name="my B200", nbytes=80 * 2**30).nbytes == 80 * 2**30
    with pytest.raises(UserError, match="nbytes is in bytes"):
        evolve(b200, name="mine", nbytes=80)
    for flops in ({}, {"bf16": 2250.0}, {"bf16": float("nan")}):
        with pytest.raises(UserError, match="flops"):
            evolve(b200, flops=flops)
    with pytest.raises(UserError, match="flops_efficiency"):
        evolve(b200, flops_efficiency=1.2)
    with pytest.raises(UserError, match="latency"):
        evolve(nvlink, latency=-1e-6)
    dreamt = Link(name="dreamt", bandwidth=9e12, latency=1e-6)
    with pytest.raises(UserError, match=r"faster than the port of a B200, 6\.4.*e\+10"):
        evolve(cluster("8xB200"), inter=dreamt)
    with pytest.raises(UserError, match="faster than the memory of a mine"):
        evolve(cluster("8xB200"), device=evolve(b200, name="mine"), inter=dreamt)
    with pytest.raises(UserError, match="pod = 12 is not a whole number of nodes of 8 devices\nuse pod = 8"):
        evolve(cluster("64xB200"), pod=12)
    assert evolve(cluster("6xB200"), pod=32).levels == cluster("6xB200").levels
    with pytest.raises(UserError, match="give pod, the number of devices"):
        evolve(cluster("64xB200"), oversubscription=2)
    with pytest.raises(UserError, match="whole number of nodes of 4\nuse 8 or 12 devices"):
        evolve(cluster("8xB200"), count=10, per_node=4)
    with pytest.raises(UserError, match="count"):
        evolve(cluster("8xB200"), count=0)


def test_a_device_is_a_key() -> None:
    first = PRESETS["H100"].device
    assert len({first, Device(**{k: getattr(first, k) for k in Device.__annotations__})}) == 1


@given(st.integers(1, 10**5), st.integers(1, 10**5))
def test_more_devices_wait_for_a_slower_one_where_power_limits_the_clock(few: int, more: int) -> None:
    h100, a100 = PRESETS["H100"].device, PRESETS["A100"].device
    few, more = sorted((few, more))
    of = [evolve(cluster("8xH100"), count=n, per_node=1).slowest.sustained for n in (1, few, more)]
    assert h100.sustained == of[0] >= of[1] >= of[2] > 0.9 * of[0]
    assert evolve(cluster("8xA100"), count=more, per_node=1).slowest == a100
