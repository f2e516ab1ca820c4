"""Plans of layouts that our runtime does not train: they are made, and say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
from attrs import evolve, frozen

from megaloom.dsl import (
    MLA,
    Concat,
    Dim,
    Each,
    Embed,
    Graph,
    Layer,
    Mamba2,
    MoE,
    NextToken,
    Normalize,
    Rename,
    Rope,
    Slice,
    Split,
    SwiGLU,
    Unembed,
    Value,
    apply,
    dot,
    graph,
    ids,
    model,
    residual,
    weight,
)
from megaloom.dsl.catalog import examples
from megaloom.dsl.sharding_table import Sharded
from megaloom.planner.cli.main import main
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.rules.capabilities import (
    TRAINED,
    runtime_violations,
    unrouted_experts,
)
from megaloom.planner.rules.export_rules import export_violations
from megaloom.planner.rules.padding import padding_refusal
from megaloom.planner.rules.rule import Owner
from megaloom.planner.rules.rules import violations
from tests.support.models.examples import example
from tests.support.models.small import tiny_pair

WORK = Workload(seq=64, batch=8)


@frozen
class Own(Layer):
    """An expert of the user's own."""

    def body(self, x: Value, /, **side: Value) -> Value:
        return x >> SwiGLU(16)


MAMBA = Mamba2(heads=8, head_dim=16, state=8)
LATENT = MLA(heads=4, q_rank=None, kv_rank=8, nope=4, rope=4, v=4, positions=Rope(1e4))


def lm(mix: Layer) -> Graph:
    wte = weight("wte", Dim("vocab", 64), Dim("embed", 16))
    return graph(model("own", ids() >> Embed(wte) >> residual(mix) >> Unembed(wte) >> NextToken()))


def refused_rules(mix: Layer, ep: int, precision: str = "bf16") -> list[str]:
    work = Workload(seq=64, batch=8, precision=Precision(precision))
    return [v.rule for v in runtime_violations(Layout(dp=ep, ep=ep), lm(mix), work, cluster(f"{ep}xH100"))]


@frozen
class Unsent(Layer):
    """Experts that all read all tokens."""

    def body(self, x: Value, /, **side: Value) -> Value:
        e, n = x["embed"], Dim("experts", 4)
        wide = apply(Rename("wide", "embed"), dot(x, weight("fan", e, n, Dim("wide", e.known)), "embed"))
        return dot(wide >> Each("experts", Own()), weight("mix", n), "experts")


@pytest.mark.parametrize(
    ("mix", "divided"),
    [
        (MoE(SwiGLU(16), 4, 2), True),
        (MoE(Own(), 4, 2, shared=Own()), True),
        (Unsent(), False),
    ],
)
def test_experts_to_which_no_tokens_are_sent_are_not_divided(mix: Layer, divided: bool) -> None:
    assert refused_rules(mix, 1) == []
    assert refused_rules(mix, 2) == ([] if divided else ["runtime-experts"])


@frozen
class Padded(Layer):
    """A dim of 130 channels, which tp 4 pads to 132, under one op."""

    op: str
    splits: ClassVar[dict[str, Sharded]] = {"channels": Sharded("tp", "pad")}

    def body(self, x: Value, /, **side: Value) -> Value:
        e, c = x["embed"], Dim("channels", 130)
        h = dot(x, weight("up", e, c), "embed")
        if self.op == "concat":
            h = apply(Concat("channels"), h, h)
            c = Dim("channels", 260)
        elif self.op == "slice":
            h = apply(Slice("channels", 0, 130), h)
        elif self.op == "normalize":
            h = apply(Normalize(("channels",), True, 1e-5), h)
        return dot(h, weight("down", c, e), "channels")


@frozen
class Whole(Padded):
    splits: ClassVar[dict[str, Sharded]] = {"channels": Sharded("tp", "whole")}


@pytest.mark.parametrize("op", ["concat", "slice", "normalize", ""])
def test_a_plan_says_that_the_runtime_cannot_join_slice_or_normalize_over_padding(op: str) -> None:
    work = Workload(seq=64, batch=8)
    for tp, layer in ((1, Padded(op)), (2, Padded(op)), (4, Padded(op)), (4, Whole(op))):
        g = lm(layer)
        layout = Layout(tp=tp, sequence_parallel=tp > 1)
        broken = runtime_violations(layout, g, work, cluster(f"{tp}xH100"))
        refused = [words for n in g.nodes if not n.is_input and (words := padding_refusal(n, Split(tp=tp)))]
        assert [(v.message, v.fix) for v in broken] == refused
        assert [v.rule for v in broken] == (["runtime-padding"] if op and (tp, type(layer)) == (4, Padded) else [])
        for v in broken:
            assert f"applies {op} to channels=130, which is padded to divide by tp 4" in v.message
            assert v.fix == (
                'declare splits = {"channels": Sharded("tp", "whole")} in Padded, or use a tp that divides 130'
            )


@pytest.mark.parametrize(
    ("mix", "layout", "rule"),
    [
        (MoE(SwiGLU(16), 4, 2), Layout(tp=2, sequence_parallel=True), "experts-reduced"),
        (MoE(SwiGLU(16), 4, 2), Layout(dp=2, etp=2), "experts-reduced"),
        (MoE(SwiGLU(16), 4, 2), Layout(tp=2, sequence_parallel=True, etp=2), ""),
        (MoE(SwiGLU(16), 4, 2), Layout(dp=2, tp=2, sequence_parallel=True, ep=2), ""),
        (LATENT, Layout(tp=2), "latent-sp"),
        (LATENT, Layout(tp=2, sequence_parallel=True), ""),
    ],
)
def test_what_megatron_core_computes_wrongly(mix: Layer, layout: Layout, rule: str) -> None:
    work, machine = Workload(seq=64, batch=8), cluster(f"{layout.world}xH100")
    assert violations(layout, lm(mix), work, machine) == runtime_violations(layout, lm(mix), work, machine) == ()
    assert [v.rule for v in export_violations(layout, lm(mix), work, machine)] == ([rule] if rule else [])


def test_megatron_core_does_not_interleave_models_with_mamba() -> None:
    for layout, rules in ((Layout(pp=2, vpp=2), ["mamba-chunks"]), (Layout(pp=4), [])):
        case = (lm(MAMBA), Workload(seq=64, batch=8), cluster(f"{layout.world}xH100"))
        assert [v.rule for v in export_violations(layout, *case)] == rules


def test_precisions() -> None:
    assert refused_rules(MoE(SwiGLU(16), 4, 2), 1, "fp8") == ["runtime-precision"]


def test_layouts_divide_the_length_that_an_encoder_has_of_its_own() -> None:
    g, machine = graph(tiny_pair()), cluster("16xH100")  # it reads 24 tokens, and writes as many as the workload says
    assert violations(Layout(cp=4, dp=4), g, WORK, machine) == ()
    (broken,) = violations(Layout(cp=8, dp=2), g, Workload(seq=64, batch=8), machine)
    assert (broken.rule, broken.message) == ("seq", "a sequence of 24 is not a multiple of 2 x cp 8")
    assert broken.fix == "declare a sequence of 16 or 32"


@pytest.mark.parametrize("name", sorted(examples()))
def test_the_runtime_trains_all_examples(name: str) -> None:
    g = graph(example(name))
    assert unrouted_experts(g) is None
    for x in (Layout(), Layout(pp=2), Layout(pp=2, vpp=2)):
        assert runtime_violations(x, g, WORK, cluster(f"{x.world}xH100")) == ()


def test_the_runtime_has_these_limits() -> None:
    from megaloom.runtime.megatron import device

    device.prepare()
    from megaloom.runtime.megatron.build_context import DTYPES

    assert tuple(DTYPES) == TRAINED


@pytest.mark.parametrize(
    ("name", "layout", "seq", "reason"),
    [
        ("llama3-8b", Layout(tp=2, sequence_parallel=True), 4096, ""),
        ("gpt2", Layout(), 1024, ""),
        ("mixtral-8x7b", Layout(), 4096, "no fp8 for"),
        ("mamba2-1.3b", Layout(), 4096, "no fp8 for"),
        ("llama3-8b", Layout(dp=2, shard="weights"), 4096, "--shard weights"),
        ("llama3-8b", Layout(recompute="selective", recompute_modules=("mlp",)), 4096, "recompute mlp in fp8"),
        ("llama3-8b", Layout(), 4097, "no multiple of 16"),
    ],
)
def test_fp8_of_the_runtime(name: str, layout: Layout, seq: int, reason: str) -> None:
    work = evolve(WORK, precision=Precision.FP8, seq=seq)
    found = runtime_violations(layout, graph(example(name)), work, cluster(f"{layout.world}xH100"))
    assert [v.rule for v in found] == ["runtime-precision"] * bool(reason) and all(reason in v.message for v in found)


def test_a_plan_that_the_runtime_does_not_run_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["gpt2", "--gpus", "1xB200", "--precision", "mxfp8", "-o", str(tmp_path / "plan.json")]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "cannot run this plan: the runtime does not train in mxfp8 [runtime-precision]" in output
    assert "Next: megaloom export " in output
    assert output.endswith("(our own runtime cannot run it: the runtime does not train in mxfp8)\n")
    assert main([*arguments, "--lint", "--dp", "1"]) == 0
    assert "[runtime-precision]" in capsys.readouterr().out


def test_lint_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mixtral-8x7b", "--gpus", "8xH100", "--lint", "--json"]) == 0
    rules = json.loads(capsys.readouterr().out)["rules"]
    assert {"id", "sentence", "fix", "owner", "source"} == {*rules[0]}
    assert {rule["owner"] for rule in rules} == {*Owner} and len({rule["id"] for rule in rules}) == len(rules)
    arguments = ["mixtral-8x7b", "--gpus", "8xH100", "--tp", "8", "--no-sequence-parallel", "--precision", "fp8"]
    assert main([*arguments, "--lint", "--json"]) == 1
    output = json.loads(capsys.readouterr().out)
    names = {name: [each["rule"] for each in output[name]] for name in ("violations", "limits", "wrong")}
    assert names == {"violations": ["moe-sp"], "limits": ["runtime-precision"], "wrong": ["experts-reduced"]}


def test_plans_for_megatron_core_leave_out_what_it_computes_wrongly(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "mixtral-8x7b",
        "--gpus",
        "8xH200",
        "--batch",
        "8",
        "--tp",
        "8",
        "--sequence-parallel",
        "--ep",
        "1",
        "--etp",
        "1",
    ]
    assert main([*arguments, "--runtime", "megatron"]) == 2
    output = capsys.readouterr().err
    assert "experts have ep 1 and etp 1, but tp is 8 [experts-reduced]" in output
    assert output.endswith("use --ep 2 instead of --ep 1\nuse --etp 8 instead of --etp 1\n")
