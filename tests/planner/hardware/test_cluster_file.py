"""Cluster files: the fields that they change in their base, and refused values."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from megaloom.dsl.errors import UserError
from megaloom.planner.cli.main import main
from megaloom.planner.contract.plan_json import load
from megaloom.planner.export.slurm import machines
from megaloom.planner.hardware.cluster_file import (
    COUNT_FIELDS,
    FIGURE_FIELDS,
    REPORT_FIELDS,
    TABLE_FIELDS,
)
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.hardware.presets import PRESETS
from tests.support.paths import ROOT

FIELDS = ("version", "base", "name", *COUNT_FIELDS, *FIGURE_FIELDS, *TABLE_FIELDS, *REPORT_FIELDS)
NAMES = [*FIELDS, "bandwidth", "nbytes", "flops", "bf16", "latency"]


def written(folder: Path, text: str, name: str = "ours.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_what_a_file_does_not_say_is_its_bases(tmp_path: Path) -> None:
    path = written(tmp_path, 'base = "H100"\n')
    for count in (1, 8, 64):
        assert evolve(cluster(f"{count}x{path}"), source="") == cluster(f"{count}xH100")
    assert str(cluster(f"16x{path}")) == f"16x{path}"


def test_what_it_says_is_so(tmp_path: Path) -> None:
    text = """
        base = "H100"
        name = "H100 of ours"
        count = 64
        per_node = 4
        nics = 1
        pod = 16
        oversubscription = 3
        failures = 1e-4
        [device]
        nbytes = 100e9
        flops = {bf16 = 9e14}
        [intra]
        bandwidth = 2e11
        latency = 1e-5
        [inter]
        bandwidth = 40e9
    """
    c, base = cluster(written(tmp_path, text)), PRESETS["H100"]
    assert (c.count, c.per_node, c.pod, c.oversubscription, c.failures) == (64, 4, 16, 3, 1e-4)
    assert (c.device.name, c.device.nbytes) == ("H100 of ours", 10**11)
    assert c.device.flops == {**base.device.flops, "bf16": 9e14}
    assert c.device.attend_efficiency == base.device.attend_efficiency
    assert (c.intra.bandwidth, c.intra.latency, c.intra.efficiency) == (2e11, 1e-5, base.intra.efficiency)
    assert c.inter.bandwidth == 10e9  # one card for four
    assert cluster(f"8x{tmp_path / 'ours.toml'}").count == 8
    assert machines(cluster(written(tmp_path, 'base = "H100"\ncount = 64\nper_node = 4'))) == (16, 4)


def test_bytes_are_whole_numbers_also_after_a_plan_was_read(tmp_path: Path) -> None:
    """Reading a plan resolves the annotations of its classes, which were texts before."""
    path = written(tmp_path, 'name = "ours"\nbase = "H100"\n[device]\nnbytes = 70e9\n')
    plan_path = tmp_path / "plan.json"
    for _ in range(2):
        assert main(["gpt2", "--gpus", path, "--seq", "64", "--dp", "1", "-o", str(plan_path)]) == 0
        assert type(load(plan_path).cluster.device.nbytes) is int


def test_the_example_of_the_guide(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "guide" / "clusters.md").read_text()
    example = guide.partition("```toml\n")[2].partition("```")[0]
    c = cluster(written(tmp_path, example))
    assert (c.count, c.pod, c.inter.bandwidth) == (1024, 256, 12.5e9)


def test_json_says_the_same(tmp_path: Path) -> None:
    text = {"version": 1, "base": "A100", "count": 8, "intra": {"bandwidth": 2.5e11}, "measured": []}
    assert cluster(written(tmp_path, json.dumps(text), "p.json")).intra.bandwidth == 2.5e11


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no base"),
        ("base = 8", "has the base 8, which is not known"),
        ('base = "H101"', 'write base = "H100"; known: A100'),
        ('base = "H100', "is not TOML"),
        ('base = "H100"\nversion = 9', "has version 9; this megaloom reads version 1"),
        ('base = "H100"\nnodes = 4', "unknown field, 'nodes'"),
        ('base = "H100"\nper_nodes = 4', "did you mean per_node?"),
        ('base = "H100"\ncount = 0', "has count = 0\ncount must be a whole number from 1 to 1,048,576"),
        (f'base = "H100"\ncount = {2**63}', f"has count = {2**63}\ncount must be a whole number from 1 to 1,048,576"),
        ('base = "H100"\nnics = 0.5', "has nics = 0.5"),
        ('base = "H100"\nfailures = "few"', "has failures = 'few'\nfailures must be a number"),
        ('base = "H100"\nfailures = nan', "has failures = nan"),
        ('base = "H100"\ninter = 25e9', "inter is a table: write [inter]"),
        ('base = "H100"\n[inter]\nbandwith = 1', "unknown field of inter, 'bandwith'; did you mean bandwidth?"),
        ('base = "H100"\n[device]\nflops = 1e15', "give a peak for each precision"),
        ('base = "H100"\n[device.flops]\nbf17 = 1e15', "unknown precision of device.flops, 'bf17'; did you mean bf16?"),
        (
            'base = "H100"\n[device.flops]\nbf16 = 2e15',
            "device.flops.bf16 = 2e+15, but that of an H100 is 9.894e+14",
        ),
        ('base = "B200"\n[device]\nnbytes = 80e9', "nbytes is 74.5 GiB, but a B200 has 178.3 GiB"),
        ('base = "H100"\n[device]\nbandwidth = 8e12', "has device.bandwidth = 8e+12, but that of an H100 is 3.35e+12"),
        ('base = "H100"\n[inter]\nbandwidth = 400e9', "faster than the port of an H100"),
        ('base = "H100"\nnics = 16', "faster than the port of an H100"),
        ('base = "H100"\n[inter]\nlatency = 5', "Link InfiniBand NDR: latency = 5 is not plausible"),
        ('base = "H100"\ncount = 16\npod = 12', "pod = 12 is not a whole number of nodes of 8"),
        ('base = "H100"\noversubscription = 0.5', "oversubscription = 0.5 is not plausible"),
        ('base = "H100"\ncount = 12', "use 8 or 16, or describe"),
    ],
)
def test_a_wrong_file_says_what_would_work(text: str, says: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UserError) as caught:
        cluster(path)
    assert says.format(path=path) in str(caught.value)
    assert path in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"), [(b"{", "is not JSON"), (b"[1]", "has no fields"), (b"\xff\xfe", "is not JSON")]
)
def test_a_damaged_profile(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        cluster(str(path))
    path.write_text('{"version": 3, "stages": []}')
    with pytest.raises(UserError, match="is a plan, not a cluster"):
        cluster(str(path))
    with pytest.raises(UserError, match="cannot be read: No such file"):
        cluster(str(tmp_path / "none.toml"))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(sorted(PRESETS)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(PRESETS)), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
def test_whatever_a_file_says_is_a_cluster_or_refused(base: str, message: dict[str, object]) -> None:
    with TemporaryDirectory() as folder:
        path = written(Path(folder), json.dumps({"base": base, **message}), "any.json")
        refused = None
        try:
            result = cluster(f"8x{path}")
        except UserError as error:
            refused = str(error)
        assert path in refused if refused else result.count == 8


def test_a_plan_for_a_files_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    written(tmp_path, 'base = "H100"\n[device]\nflops_efficiency = 0.4')
    monkeypatch.chdir(tmp_path / "there")
    seconds = []
    for gpus in ("8xH100", "8x../ours.toml"):
        assert main(["gpt2-xl", "--gpus", gpus, "--batch", "64", "-o", "plan.json"]) == 0
        seconds.append(load("plan.json").predicted.breakdown["forward"])
    assert 1.3 * seconds[0] < seconds[1] < 2 * seconds[0]
    assert main(["gpt2", "--gpus", "none.toml"]) == 2
    assert "plan: none.toml cannot be read" in capsys.readouterr().err
