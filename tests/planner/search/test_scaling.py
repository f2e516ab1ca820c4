"""Scaling tables: each row is the best layout on its cluster, and no row of a Pareto front beats another one."""

from __future__ import annotations

import json
from itertools import pairwise, permutations
from pathlib import Path

import pytest

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import graph
from megaloom.examples.gpt2 import gpt2
from megaloom.examples.llama3 import llama3_8b
from megaloom.planner.cli.main import main
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.workload import Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.search.scaling import MEMORY_STEP, Goal, clusters_in_range, scaling_points
from megaloom.planner.search.search import plan


def work(machine: Cluster) -> Workload:
    return Workload(seq=2048, batch=4 * machine.count)


def test_a_row_of_clusters() -> None:
    assert clusters_in_range("8..64xH100") == tuple(cluster(f"{n}xH100") for n in (8, 16, 32, 64))
    assert clusters_in_range("6..20xCPU") == (cluster("6xCPU"), cluster("12xCPU"))
    assert clusters_in_range("4xB200") == (cluster("4xB200"),)
    for wrong in ("8..4xH100", "a..b", "0..4"):
        with pytest.raises(UserError):
            clusters_in_range(wrong)


def test_each_point_is_the_best_there() -> None:
    results = list(scaling_points(graph(llama3_8b()), clusters_in_range("1..4xH100"), work, {}, 0.05))
    assert [p.cluster.count for p in results] == [1, 2, 4]
    for p in results:
        if p.best is None:
            with pytest.raises(UserError):
                plan(llama3_8b(), p.cluster, work(p.cluster), ref="")
        else:
            best = plan(llama3_8b(), p.cluster, work(p.cluster), ref="").best
            assert (p.best.layout, p.best.prediction) == (best.layout, best.predicted)
    assert results[0].best is None  # 8 billion parameters with their optimizer are more than one device holds
    assert results[2].best is not None


def test_the_goal_says_which_of_nearly_equal_layouts_is_shown() -> None:
    found = plan(llama3_8b(), cluster("64xH100"), Workload(seq=8192, batch=512), ref="")
    assert found.fastest.layout != found.recommended.layout
    for goal, due in ((Goal.SIMPLEST, found.recommended), (Goal.FASTEST, found.fastest)):
        (point,) = scaling_points(
            graph(llama3_8b()), [cluster("64xH100")], lambda _: Workload(seq=8192, batch=512), {}, 0.05, goal=goal
        )
        assert point.best is not None and point.best.layout == due.layout


def test_less_memory_takes_longer() -> None:
    results = [
        p.best
        for p in scaling_points(graph(llama3_8b()), clusters_in_range("8xH100"), work, {}, 0.05, goal=Goal.PARETO)
    ]
    assert len(results) > 2
    for quick, lean in pairwise(results):
        assert quick is not None
        assert lean is not None
        assert quick.seconds < lean.seconds * 1.002  # of layouts as quick as the quickest the simplest is shown
        assert max(lean.partition.peaks) <= MEMORY_STEP * max(quick.partition.peaks) + 100


def test_none_shown_is_beaten_by_fewer_devices() -> None:
    """Time by token, memory of a device, devices: each shown is better than every other in one of them."""
    few = Workload(seq=1024, batch=8)  # too few for 16 devices to be quicker than 8
    result = scaling_points(graph(gpt2()), clusters_in_range("4..16xH100"), lambda _: few, {}, 0.05, goal=Goal.PARETO)
    points = [(p.best.seconds, max(p.best.partition.peaks), p.cluster.count) for p in result if p.best]
    assert {n for *_, n in points} == {4, 8, 16}
    for one, other in permutations(points, 2):
        assert any(x < y for x, y in zip(one, other, strict=True)), (one, other)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt2", "--gpus", "1..4xCPU", "--pp", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["GPUs", "1xCPU", "2xCPU", "4xCPU"]


def test_the_table_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt2", "--gpus", "2..4xH100", "--tp", "4", "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)["points"]
    assert one == {"gpus": "2xH100"}  # where nothing is legal
    assert (two["gpus"], two["layout"]["tp"]) == ("4xH100", 4)
    assert {"step_seconds", "memory_gib", "memory_gib_high", "tokens_per_second_per_gpu", "mfu"} <= {*two["predicted"]}
    assert main(["gpt2", "--gpus", "4xH100", "--tp", "4", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)["plans"][0]
    assert alone["runtime"] == "megaloom"
    assert {name: alone[name] for name in ("layout", "predicted", "workload")} == {
        name: two[name] for name in ("layout", "predicted", "workload")
    }


def test_the_rules_need_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--lint"]) == 0
    alone = capsys.readouterr().out
    assert main(["gpt2", "--lint"]) == 0
    assert capsys.readouterr().out == alone
    assert main(["--lint", "--tp", "2"]) == 2
    assert capsys.readouterr().err.startswith("plan: MODEL is missing\nMODEL can be file.py:name")


def test_lint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt2", "--gpus", "8xH100", "--lint"]) == 0
    assert "tp divides the attention heads." in capsys.readouterr().out
    assert main(["gpt2", "--gpus", "8xH100", "--lint", "--tp", "2"]) == 0
    capsys.readouterr()
    assert main(["gpt2", "--gpus", "8xH100", "--lint", "--tp", "8", "--vpp", "2"]) == 1
    output = capsys.readouterr().out
    for rule in ("tp-heads", "vpp-pp"):
        assert f"[{rule}]" in output


def test_a_broken_rule_has_one_exit_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A layout that breaks a rule is a failed check, given by hand or read from a run; wrong input is another code."""
    model = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512 --max-position-embeddings 512"
    batch = "--micro-batch-size 1 --global-batch-size 8 --bf16 --vocab-size 50257"
    script = tmp_path / "run.sh"
    script.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {model} {batch} --tensor-model-parallel-size 8\n")
    assert main(["--from", str(script), "--gpus", "8xH100"]) == 1
    assert "[tp-heads]" in capsys.readouterr().out
    assert main(["gpt2", "--gpus", "8xH100", "--lint", "--tp", "8"]) == 1
    assert "[tp-heads]" in capsys.readouterr().out
    assert main(["gpt2", "--gpus", "8xH100", "--lint", "--tp", "0"]) == 2
    assert capsys.readouterr().err.startswith("plan: tp must be at least 1")


def test_lint_takes_what_a_search_would_find(capsys: pytest.CaptureFixture[str]) -> None:
    """Experts under tp need sequence parallelism: what is not said of it is not broken, what is said may be."""
    arguments = ["mixtral-8x7b", "--gpus", "16xH100", "--lint", "--tp", "2", "--ep", "8"]
    assert main(arguments) == 0
    assert main([*arguments, "--no-sequence-parallel"]) == 1
    assert "[moe-sp]" in capsys.readouterr().out


def test_headroom(capsys: pytest.CaptureFixture[str]) -> None:
    machine, load = cluster("8xH100"), Workload(seq=2048, batch=32)
    for free in (0.0, 0.3, 0.6):
        best = plan(llama3_8b(), machine, load, ref="", headroom=free).best
        assert max(sum(nbytes.values()) for nbytes in best.predicted.nbytes) <= (1 - free) * machine.device.nbytes
    assert main(["gpt2", "--memory-headroom", "110%"]) == 2
    assert "10% or 0.1" in capsys.readouterr().err
