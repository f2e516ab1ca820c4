"""The `plan` command: its output, and the files that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaloom.dsl.catalog import find
from megaloom.dsl.graph import graph
from megaloom.planner.cli import main
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.plan_json import load
from megaloom.planner.contract.workload import Runtime
from megaloom.planner.report.chrome_trace import replay
from megaloom.planner.rules.plan_check import check_plan

OWN = """
from megaloom.dsl import Attention, Dim, Embed, Model, NextToken, RMSNorm, SwiGLU, Unembed
from megaloom.dsl import ids, model, repeat, residual, weight

def small() -> Model:
    wte = weight("wte", Dim("vocab", 256), Dim("embed", 64))
    block = residual(RMSNorm(), Attention(heads=4, rope=10_000)) >> residual(RMSNorm(), SwiGLU(128))
    return model("small", ids() >> Embed(wte) >> repeat(4, block) >> RMSNorm() >> Unembed(wte) >> NextToken())
"""


def run(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of `plan`."""
    code = main.main(args)
    output = capsys.readouterr()
    return code, output.out, output.err


def test_a_plan_is_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("gpt2", "--gpus", "8xH100", "--batch", "64", capsys=capsys)
    assert (code, err) == (0, "")
    assert out.startswith("gpt2: 124,439,808 parameters on 8xH100 (one node); searched for ")
    assert "One step: 64 sequences of 1,024 tokens, 65,536 tokens in all (default --seq)" in out
    assert out.endswith("wrote plan.json. Next: megaloom train plan.json\n")
    assert out.replace("−", "-").isascii()  # a difference may be negative
    assert all(line == line.rstrip() for line in out.splitlines())
    plan = load("plan.json")
    check_plan(plan, find("gpt2")[0])
    assert sum(plan.predicted.breakdown.values()) == pytest.approx(plan.predicted.step_seconds)
    assert all(reason in out for reason in plan.reasons)


def test_a_model_of_ones_own_with_axes_fixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(OWN)
    target = tmp_path / "sub.json"
    fixed = ["--tp", "2", "--pp", "2", "--micro-batch", "1", "--recompute", "full", "--no-distributed-optimizer"]
    args = (str(tmp_path / "own.py"), "--gpus", "8xCPU", "--precision", "fp32", *fixed, "-o", str(target))
    code, out, err = run(*args, capsys=capsys)
    assert (code, err) == (0, "")
    x = load(target).layout
    assert (x.tp, x.pp, x.micro_batch, x.recompute, x.distributed_optimizer) == (2, 2, 1, Recompute.FULL, False)
    assert f"wrote {target}" in out


def test_modules_to_recompute_are_named_as_megatron_core_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "plan.json"
    args = ("gpt2", "--gpus", "2xH100", "--batch", "8", "-o", str(target), "--recompute-modules", "mlp", "layernorm")
    code, out, err = run(*args, capsys=capsys)
    assert (code, err) == (0, "")
    assert load(target).layout.recompute_text == "selective: layernorm, mlp"
    assert "recompute selective: layernorm, mlp" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layer_norm"], "--recompute-modules must be some of core_attn, layernorm, "),
        (
            ["moe"],
            "[recompute-modules]\ndrop --recompute-modules moe\n",
        ),
        (["moe", "--tp", "3"], "\nuse --tp 2 instead of --tp 3, and drop --recompute-modules moe\n"),
        (["none"], "shared_experts, moe; got 'none'\n"),
        (["mlp", "--recompute", "full"], "names mlp [recompute-modules]"),
    ],
)
def test_modules_that_cannot_be_recomputed(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "plan.json")
    code, _, err = run("gpt2", "--gpus", "2xH100", "-o", target, "--recompute-modules", *words, capsys=capsys)
    assert code == 2
    assert message in err


def test_a_config_of_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 128, "vocab_size": 256}
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], **small}))
    monkeypatch.chdir(tmp_path)
    code, out, err = run("small", "--gpus", "2xCPU", "--seq", "128", "--batch", "8", capsys=capsys)
    assert (code, err) == (0, "")
    assert out.startswith("small: 224,640 parameters on 2xCPU")
    planned = load("plan.json")
    assert planned.model == str(tmp_path / "small" / "config.json")
    monkeypatch.chdir("/")
    check_plan(planned, find(planned.model)[0])


def test_a_model_of_images_has_no_sequence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Throughput is in images, and context parallelism is illegal, because there is no sequence to shard."""
    words, path = ["vit-base", "--gpus", "8xA100", "--batch", "64"], tmp_path / "plan.json"
    code, out, _ = run(*words, "-o", str(path), capsys=capsys)
    assert code == 0 and "\nOne step: 64 inputs (default --seq)\n" in out and load(path).workload.tokens == 64
    code, _, err = run(*words, "--cp", "2", capsys=capsys)
    assert code == 2 and "[seq]" in err


def test_the_fastest_is_chosen_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("llama3-8b", "--gpus", "64xH100", "--seq", "8192", "--batch", "512", "--json")
    simple, fast = (json.loads(run(*words, *more, capsys=capsys)[1]) for more in ((), ("--fastest",)))
    assert 0 < simple["slower_than_fastest"] <= 0.01 and fast["slower_than_fastest"] == 0
    seconds = [found["plans"][0]["predicted"]["step_seconds"] for found in (simple, fast)]
    assert seconds[0] / seconds[1] - 1 == pytest.approx(simple["slower_than_fastest"])


def test_json_is_for_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("gpt2", "--gpus", "4xH100", "--json", "--top", "3", capsys=capsys)
    assert (code, err) == (0, "")
    output = json.loads(out)
    assert set(output) == {"version", "slower_than_fastest", "plans", "rejected"}
    assert len(output["plans"]) == 3
    for plan in output["plans"]:
        layout, predicted = plan["layout"], plan["predicted"]
        assert layout["dp"] * layout["tp"] * layout["pp"] * layout["cp"] == 4
        assert sum(predicted["breakdown_seconds"].values()) == pytest.approx(predicted["step_seconds"])
        assert predicted["memory_gib"] == pytest.approx(max(sum(r.values()) for r in predicted["memory_gib_by_rank"]))
        assert {"vpp", "ep", "etp", "micro_batch", "recompute"} < set(layout)
        assert {"tokens_per_second_per_gpu", "mfu"} < set(predicted)
    assert all({"layout", "cause"} == set(r) for r in output["rejected"])
    assert any("slower: " in r["cause"] for r in output["rejected"])
    assert not any(r["layout"] == plan["layout"] for r in output["rejected"] for plan in output["plans"])
    assert list(tmp_path.iterdir()) == []


def test_a_plan_is_for_what_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each runtime has prices of its own."""
    monkeypatch.chdir(tmp_path)
    given = (
        "mixtral-8x7b",
        "--gpus",
        "64xH100",
        "--seq",
        "4096",
        "--batch",
        "256",
        "--tp",
        "2",
        "--pp",
        "4",
        "--ep",
        "2",  # so that each device has several experts, which are modules of their own here, and one product there
    )
    steps = {}
    for runtime in Runtime:
        code, out, _ = run(*given, "--runtime", runtime, "-o", f"{runtime}.json", capsys=capsys)
        assert code == 0
        assert ("run by Megatron-core with Transformer Engine" in out) == (runtime is Runtime.MEGATRON)
        assert ("Next: megaloom train" in out) == (runtime is Runtime.MEGALOOM)
        assert ("--to megatron-lm\n" in out) == (runtime is Runtime.MEGATRON)
        planned = load(f"{runtime}.json")
        assert planned.runtime is runtime
        steps[runtime] = replay(planned, graph(find(planned.model)[0])).seconds
        assert steps[runtime] == pytest.approx(planned.predicted.step_seconds, rel=1e-9)
    assert steps[Runtime.MEGATRON] != pytest.approx(steps[Runtime.MEGALOOM], rel=1e-2)
