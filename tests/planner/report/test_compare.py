"""`explain`: a plan shown again, or two whose difference adds up."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest

from megaloom.dsl.catalog import find
from megaloom.planner.contract.plan_json import load, save
from megaloom.planner.contract.workload import Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.search.reasons import cause_differences
from megaloom.planner.search.search import plan
from megaloom.runtime.cli.main import main


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The best plan of gpt2 on 16 GPUs, and the best with tp 2 and pp 2."""
    model, ref = find("gpt2")
    paths = []
    for name, fixed in (("free", {}), ("fixed", {"tp": 2, "pp": 2})):
        result = plan(model, cluster("16xH100"), Workload(seq=1024, batch=64), ref=ref, fixed=fixed)
        paths.append(tmp_path_factory.mktemp("plans") / f"{name}.json")
        save(result.best, paths[-1])
    return paths[0], paths[1]


def test_differences_add_up(plans: tuple[Path, Path]) -> None:
    a, b = map(load, plans)
    more = b.predicted.step_seconds - a.predicted.step_seconds
    assert more > 0
    assert sum(cause_differences(a.predicted, b.predicted).values()) == pytest.approx(more, rel=1e-9)
    back = {cause: -seconds for cause, seconds in cause_differences(a.predicted, b.predicted).items()}
    assert cause_differences(b.predicted, a.predicted) == back


def test_two_plans_side_by_side(plans: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *map(str, plans)]) == 0
    out = capsys.readouterr().out
    assert "Time per token is" in out
    assert "tensor-parallel communication" in out
    assert main(["explain", *map(str, plans), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert sum(output["differences_seconds"].values()) == pytest.approx(output["difference_seconds"], rel=1e-9)


def test_what_is_printed_adds_up(plans: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Each column to its last row, as it is printed, and the difference of the steps to a thousandth of it."""
    assert main(["explain", *map(str, plans)]) == 0
    times, sizes = (
        [[Decimal(figure) for figure in line.split()[-3:]] for line in part.splitlines()[2:]]
        for part in capsys.readouterr().out.rstrip().split("\n\n")[-2:]
    )
    for *parts, whole in (times, sizes):
        assert len(parts) > 5 and [sum(column) for column in zip(*parts, strict=True)] == whole
    more = load(plans[1]).predicted.step_seconds - load(plans[0]).predicted.step_seconds
    assert float(times[-1][-1]) == pytest.approx(1e3 * more, rel=1e-3)


def test_a_plan_is_shown_and_drawn_again(
    plans: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, trace = tmp_path / "a.html", tmp_path / "a.json"
    assert main(["explain", str(plans[1]), "--html", str(html), "--trace", str(trace)]) == 0
    out = capsys.readouterr().out
    assert "Why\n- " in out
    assert "gpt2 on 16xH100" in html.read_text()
    assert json.loads(trace.read_text())["otherData"]["gpus"] == "16xH100"


def test_one_plan_for_machines_is_as_plan_says_it(plans: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(plans[0]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted"]["step_seconds"] == load(plans[0]).predicted.step_seconds


def test_what_is_no_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.json").write_text("{}")
    assert main(["explain", str(tmp_path / "bad.json")]) == 2
    assert "not a plan" in capsys.readouterr().err
