"""An export writes every option that a plan needs, or refuses what it cannot express and says what works instead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, fields

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Dropout,
    Embed,
    Layer,
    LayerNorm,
    LinearScaling,
    Llama3Scaling,
    MaskedToken,
    Model,
    MoE,
    NextToken,
    Positions,
    RMSNorm,
    Rope,
    SwiGLU,
    Unembed,
    UserError,
    YarnScaling,
    chain,
    graph,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.catalog import find
from megaloom.planner import cluster
from megaloom.planner.contract.choices import Overlap, Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plan_json import load, save
from megaloom.planner.contract.workload import Runtime, Workload
from megaloom.planner.export.decoder import read_decoder
from megaloom.planner.export.export import export_plan
from megaloom.planner.export.target import Target
from megaloom.planner.export.whole_layers import cut_at_layers
from megaloom.planner.rules.plan_check import check_plan
from megaloom.planner.search.search import plan as search
from megaloom.runtime.cli.main import main
from tests.support.exported import (
    case,
    groups,
    parsed,
    plan_with,
)
from tests.support.models.shared_weights import albert_blocks

NORM, ROPE = RMSNorm(), Attention(heads=4, rope=10_000)


def decoder(
    attention: Layer = ROPE,
    ff: Layer = SwiGLU(64),  # noqa: B008 (a frozen value)
    *,
    norm: Layer = NORM,
    last: Layer | None = None,
    before: tuple[Layer, ...] = (),
    drop: float = 0.0,
    layers: int = 4,
    loss: Layer | None = None,
) -> Model:
    """A small decoder with one thing or another about it."""
    vocab, d = Dim("vocab", 96), Dim("embed", 32)
    wte = weight("wte", vocab, d)
    behind = (Dropout(drop),) if drop else ()
    x = chain(Embed(wte), *before)(ids())
    x = x >> repeat(layers, residual(norm, attention, *behind), residual(norm, ff, *behind))
    return model("small", x >> (last or norm) >> Unembed(wte) >> (loss or NextToken()))


def options(m: Model, layout: Layout = Layout(), **more: Any) -> dict[str, Any]:  # noqa: B008
    """Return the options of the Megatron-LM script for a model, parsed."""
    args = parsed(export_plan(plan_with(m, layout, **more), m, Target.MEGATRON_LM))
    return {name: value for name, value in vars(args).items() if value is not None and value is not False}


def moe(**options: Any) -> MoE:
    return MoE(SwiGLU(32), 8, 2, **options)


POSITIONS = Positions(weight("wpe", Dim("position", 64), Dim("embed", 32)))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (decoder(Attention(heads=4)), {"position_embedding_type": "none"}),
        (decoder(Attention(heads=4), before=(POSITIONS,)), {"position_embedding_type": "learned_absolute"}),
        (decoder(Attention(heads=4, rope=Rope(10_000, 4))), {"rotary_percent": "0.5"}),
        (decoder(Attention(heads=4, rope=Rope(10_000, interleaved=True))), {"rotary_interleaved": True}),
        (
            decoder(Attention(heads=4, rope=Rope(10_000, scaling=Llama3Scaling(factor=8)))),
            {"use_rope_scaling": True, "rope_scaling_factor": "8.0"},
        ),
        (
            decoder(Attention(heads=4, rope=Rope(10_000, scaling=LinearScaling(4)))),
            {"rotary_seq_len_interpolation_factor": "4"},
        ),
        (
            decoder(Attention(heads=4, kv_heads=2, rope=10_000)),
            {"num_query_groups": "2", "group_query_attention": True},
        ),
        (decoder(Attention(heads=4, head_dim=16, rope=10_000)), {"kv_channels": "16"}),
        (decoder(Attention(heads=4, rope=10_000, window=16)), {"window_size": "15,0"}),
        (decoder(Attention(heads=4, rope=10_000, sink=True)), {"softmax_type": "learnable"}),
        (decoder(Attention(heads=4, rope=10_000, qkv_bias=True)), {"add_qkv_bias": True, "add_bias_linear": True}),
        (decoder(Attention(heads=4, rope=10_000, qk_norm=RMSNorm(over="head_dim"))), {"qk_layernorm": True}),
        (decoder(ff=MLP(64, "relu2")), {"squared_relu": True}),
        (decoder(norm=RMSNorm(1e-6, plus_one=True)), {"layernorm_zero_centered_gamma": True}),
        (decoder(drop=0.1, before=(Dropout(0.1),)), {"hidden_dropout": "0.1"}),
        (evolve(decoder(), std=0.01), {"init_method_std": "0.01"}),
        (decoder(), {"init_method_std": None}),
        (decoder(ff=moe()), {"num_experts": "8", "moe_router_topk": "2", "moe_ffn_hidden_size": "32"}),
        (decoder(ff=moe(normalize=False)), {"moe_router_pre_softmax": True}),
        (decoder(ff=moe(score="sigmoid", corrected=True)), {"moe_router_enable_expert_bias": True}),
        (decoder(ff=moe(shared=SwiGLU(48), scale=2.5)), {"moe_shared_expert_intermediate_size": "48"}),
    ],
)
def test_megatron_lm_is_told_everything_about_a_layer(declared: Model, message: dict[str, Any]) -> None:
    result = options(declared)
    assert {name: result.get(name) for name in message} == message


@pytest.mark.parametrize(
    ("declared", "names"),
    [
        (decoder(Attention(heads=4, rope=10_000, softcap=30.0)), "softcap=30"),
        (decoder(Attention(heads=4, alibi=True)), "alibi=True"),
        (decoder(Attention(heads=4, causal=False), loss=MaskedToken()), "MaskedToken"),
        (decoder(Attention(heads=4, rope=10_000, scale=0.5)), "scale=0.5"),
        (decoder(Attention(heads=4, rope=10_000.5)), "10000.5"),
        (decoder(Attention(heads=4, rope=Rope(10_000, scaling=YarnScaling(factor=4, original=64)))), "YarnScaling"),
        (decoder(Attention(heads=4, rope=10_000, qk_norm=RMSNorm(1e-3, over="head_dim"))), "qk_norm"),
        (decoder(Attention(heads=4, rope=10_000), before=(POSITIONS,)), "learned and rotary positions"),
        (decoder(Attention(heads=4, rope=10_000, bias=True)), "SwiGLU(ff=64)"),
        (decoder(ff=MLP(64, "gelu", bias=True)), "MLP(ff=64, bias=True)"),
        (decoder(ff=MLP(64, "relu")), "act=relu"),
        (decoder(norm=LayerNorm(bias=False)), "LayerNorm"),
        (decoder(last=RMSNorm(1e-3)), "rms_norm.8"),
        (decoder(drop=0.1), "dropout of 0 after the embedding and 0.1 in the layers"),
        (decoder(ff=MLP(64, dropout=0.1)), "dropout inside a feed-forward: mlp.0"),
        (decoder(ff=moe(score="sigmoid", normalize=False)), "normalize=False"),
        (decoder(ff=moe(groups=4, top_groups=2, normalize=False)), "best=2"),
        (decoder(ff=moe(bias=True)), "biases"),
        (decoder(ff=MoE(MLP(32), 8, 2, shared=SwiGLU(48))), "shared experts"),
        (decoder(chain(ROPE, NORM)), "rms_norm.1, RMSNorm(), after attention.0"),
        (albert_blocks(), "the weight 'block.layer_norm.0.scale' that layer_norm.2 and layer_norm.4 share"),
    ],
)
def test_megatron_lm_refuses_a_layer_by_its_name(declared: Model, names: str) -> None:
    with pytest.raises(UserError) as error:
        options(declared)
    what, instead = str(error.value).split("\n", 1)
    assert what.startswith("Megatron-LM cannot express") and names in what
    assert "`megaloom train` runs the plan as it is" in instead


FULL = Recompute.FULL
LLAMA, GPT2, QWEN, V3 = "llama3-8b", "gpt2", "qwen3-8b", "deepseek-v3"
SHARDED = Layout(dp=2, shard="optimizer")


@pytest.mark.parametrize(
    ("target", "name", "layout", "more", "names", "works"),
    [
        (Target.MEGATRON_LM, "mixtral-8x7b", Layout(tp=2, sequence_parallel=True), {}, "but tp is 2: it com", "etp 2"),
        (
            Target.MEGATRON_LM,
            "mixtral-8x7b",
            Layout(dp=8, recompute=Recompute.SELECTIVE, recompute_modules=("moe_act",)),
            {"precision": "fp32"},
            "recompute of moe_act in fp32",
            "bf16",
        ),
        (Target.MEGATRON_BRIDGE, GPT2, Layout(), {}, "1024 learned positions", "--seq 1024"),
        (Target.ACCELERATE, GPT2, Layout(pp=2, vpp=2), {"counts": (3,) * 4}, "vpp 2", "--vpp 1"),
        (Target.ACCELERATE, GPT2, Layout(pp=4), {"counts": (2, 3, 4, 3)}, "stages of 2, 3, 4, 3", "megatron-lm"),
        (Target.ACCELERATE, GPT2, Layout(recompute=Recompute.SELECTIVE), {}, "recompute selective", "--recompute none"),
        (
            Target.ACCELERATE,
            GPT2,
            Layout(pp=2, vpp=2, recompute=Recompute.SELECTIVE),
            {"counts": (3,) * 4},
            "vpp 2: its file has no key for model chunks; recompute selective",
            "add to the command that planned it --vpp 1 --recompute none (or full, if that does not fit)",
        ),
        (Target.ACCELERATE, QWEN, Layout(), {}, "qwen3-8b", "megatron-lm"),
        (
            Target.ACCELERATE,
            LLAMA,
            Layout(),
            {},
            "rope=500000, bias=False, kv_heads=8, SwiGLU, RMSNorm",
            "megatron-lm",
        ),
        (Target.ACCELERATE, "starcoder-1b", Layout(), {}, "ignore kv_heads=1", "megatron-lm"),
        (Target.ACCELERATE, GPT2, Layout(), {"precision": "fp8"}, "precision fp8", "bf16"),
        (Target.TORCHTITAN, GPT2, Layout(), {}, "gpt2", "llama3 8B"),
        (Target.TORCHTITAN, LLAMA, evolve(SHARDED, tp=2), {}, "tp 2 without sequence", "--sequence-parallel"),
        (
            Target.TORCHTITAN,
            LLAMA,
            evolve(SHARDED, recompute=Recompute.SELECTIVE),
            {},
            "selective",
            "--recompute full --recompute-layers 0",
        ),
        (Target.TORCHTITAN, LLAMA, Layout(dp=2, recompute=FULL, recompute_layers=3), {}, "of the first 3", "full"),
        (
            Target.TORCHTITAN,
            LLAMA,
            Layout(dp=2, cp=2),
            {},
            "dp 2 without a sharded opt",
            "--shard weights",
        ),
        (Target.TORCHTITAN, LLAMA, Layout(pp=2), {"counts": (16, 16)}, "bf16 on pp2", "fp32"),
        (Target.TORCHTITAN, LLAMA, SHARDED, {"precision": "fp16"}, "precision fp16", "bf16"),
        (Target.TORCHTITAN, V3, evolve(SHARDED, cp=2), {}, "cp 2", "--cp 1"),
        (
            Target.TORCHTITAN,
            V3,
            evolve(SHARDED, tp=2, ep=2, etp=1, sequence_parallel=True, dp=4, shard="weights"),
            {},
            "",
            "",
        ),
        (Target.TORCHTITAN, V3, evolve(SHARDED, tp=2, etp=1, sequence_parallel=True), {}, "etp 1", "--etp 2"),
        (Target.TORCHTITAN, QWEN, evolve(SHARDED, pp=2), {"counts": (18, 18)}, "pp 2", "--pp 1"),
        (Target.TORCHTITAN, LLAMA, evolve(SHARDED, overlaps=()), {}, "overlap of none", "without --overlap"),
        (
            Target.TORCHTITAN,
            LLAMA,
            evolve(SHARDED, tp=2, sequence_parallel=True, overlaps=[*Overlap][:3]),
            {},
            "overlap of tensor",
            "--overlap gradients weights",
        ),
        (Target.TORCHTITAN_0_3, LLAMA, evolve(SHARDED, cp=2), {}, "cp 2", "--cp 1"),
        (Target.TORCHTITAN_0_3, LLAMA, Layout(tp=16, sequence_parallel=True), {}, "divides 8 heads", "divides 8"),
        (Target.TORCHTITAN_0_3, V3, evolve(SHARDED, tp=2, etp=2), {}, "tp 2 without sequence", "--sequence-parallel"),
        (
            Target.TORCHTITAN_0_3,
            V3,
            evolve(SHARDED, tp=2, ep=2, etp=2, dp=4, sequence_parallel=True),
            {},
            "etp 2 with ep 2",
            "--etp 1",
        ),
        (Target.TORCHTITAN_0_3, V3, evolve(SHARDED, dp=8, ep=8, replicas=2), {}, "ep 8 of 2 replicas", "--replicas 1"),
        (
            Target.TORCHTITAN_0_3,
            "llama3-1b",
            Layout(dp=2, pp=2, shard="optimizer"),
            {"counts": (8, 8)},
            "tied embeddings",
            "--pp 1",
        ),
        (Target.TORCHTITAN, "llama3-1b", SHARDED, {}, "its own models only", "llama3 8B"),
        (Target.SLURM, LLAMA, Layout(dp=8), {"gpus": "8xCPU"}, "8xCPU", "megaloom train"),
    ],
)
def test_a_layout_is_refused_by_its_name(
    target: Target, name: str, layout: Layout, more: dict[str, Any], names: str, works: str
) -> None:
    declared, _ = find(name)
    if not names:
        assert export_plan(plan_with(declared, layout, **more), declared, target)
        return
    with pytest.raises(UserError) as error:
        export_plan(plan_with(declared, layout, **more), declared, target)
    text = str(error.value)
    assert "cannot express" in text
    parts = re.split(r"^- |cannot express ", text, flags=re.MULTILINE)[1:]  # one, or one for each line with a dash
    pairs = [part.split("\n", 1) for part in parts if "\n" in part]
    assert any(names in what and works in instead for what, instead in pairs), text


def test_all_that_a_program_cannot_express_is_named_at_once() -> None:
    declared, _ = find(LLAMA)
    layout = Layout(dp=2, shard="optimizer", recompute=FULL, recompute_layers=4)
    with pytest.raises(UserError) as error:
        export_plan(plan_with(declared, layout, gpus="2xH100", batch=4), declared, Target.TORCHTITAN)
    assert str(error.value) == (
        "torchtitan cannot express\n"
        "- recompute full of the first 4 layers of each stage: it recomputes all or none\n"
        "  plan with --recompute full --recompute-layers 0\n"
        "- --shard optimizer with 2 micro-batches: it reduces gradients after each of them\n"
        "  plan with --shard weights, or one micro-batch: --micro-batch 2"
    )


def test_what_is_not_trained_here_either_is_not_said_to_be() -> None:
    t5, _ = find("t5-small")
    with pytest.raises(UserError, match=r"2 inputs.*\n`megaloom train` cannot run it either: .* has no fp8 for"):
        export_plan(plan_with(t5, Layout(), precision="fp8"), t5, Target.MEGATRON_LM)
    llama, _ = find(LLAMA)
    with pytest.raises(UserError, match="which cannot run this plan: the runtime does not train in mxfp8"):
        export_plan(plan_with(llama, Layout(), gpus="1xB200", precision="mxfp8"), llama, Target.SLURM)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(recompute=FULL), {"recompute_method": "uniform", "recompute_num_layers": "1"}),
        (Layout(recompute=FULL, recompute_layers=3), {"recompute_method": "block", "recompute_num_layers": "3"}),
        (
            Layout(recompute=Recompute.SELECTIVE),
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        ),
        (
            Layout(recompute=Recompute.SELECTIVE, recompute_modules=("mlp", "layernorm")),
            {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]},
        ),
        (Layout(pp=2, vpp=2, microbatch_group=4), {"microbatch_group_size_per_vp_stage": "4"}),
        (
            Layout(dp=4, tp=2, sequence_parallel=True, shard="optimizer"),
            {"sequence_parallel": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        ),
        (Layout(dp=4, overlaps=()), {"overlap_grad_reduce": None, "overlap_param_gather": None}),
        (Layout(tp=2, sequence_parallel=True, overlaps=("tensor",)), {"tp_comm_overlap": True}),
        (Layout(dp=2, ep=2, overlaps=("experts",)), {"overlap_moe_expert_parallel_comm": True}),
    ],
)
def test_megatron_lm_is_told_everything_about_a_layout(layout: Layout, message: dict[str, Any]) -> None:
    results = options(decoder(), layout, counts=(1,) * 4 if layout.pp > 1 else ())
    assert {name: results.get(name) for name in message} == message


def test_full_recompute_is_of_layers() -> None:
    """A block of two layers computes both again at once, which Megatron-LM does with all layers or none."""
    half = residual(NORM, ROPE) >> residual(NORM, SwiGLU(64))
    wte = weight("wte", Dim("vocab", 96), Dim("embed", 32))
    declared = model("pairs", ids() >> Embed(wte) >> repeat(2, half, half) >> NORM >> Unembed(wte) >> NextToken())
    assert options(declared)["num_layers"] == "4"
    with pytest.raises(UserError, match="blocks are not one layer each"):
        options(declared, Layout(recompute=FULL))


def test_every_field_of_a_layout_is_known_here() -> None:
    """A field that is new must be exported, or refused, before it may be added here."""
    assert {f.name for f in fields(Layout)} == {
        *("dp", "tp", "pp", "vpp", "cp", "ep", "etp", "sequence_parallel", "micro_batch"),
        *("recompute", "recompute_modules", "recompute_layers", "microbatch_group", "shard", "reshard"),
        "overlaps",
        "vocab_multiple",
        "grad_reduce",
        "reshard",
        "replicas",
        "expert_shard",
    }


@pytest.mark.parametrize(("cut", "named"), [(5, "rms_norm.1"), (11, "rms_norm.3")])
def test_a_stage_that_begins_inside_of_a_layer_is_refused(cut: int, named: str) -> None:
    declared = decoder()
    with pytest.raises(UserError, match=rf"stage 1, which begins inside of a layer, with {named}(.|\n)*--runtime meg"):
        export_plan(plan_with(declared, Layout(pp=2), cuts=(cut,)), declared, Target.MEGATRON_LM)


def test_stages_are_cut_anew_at_whole_layers() -> None:
    """A plan with stages between whole layers has the layout of the original one, and a prediction of its own."""
    declared, ref = find("stdlib-gpt")
    inside = plan_with(declared, Layout(pp=2), cuts=(11,), gpus="2xCPU", precision="fp32", ref=ref)
    read = read_decoder(graph(declared), Target.MEGATRON_LM)
    outside = cut_at_layers(inside, declared, read)
    check_plan(outside, declared)
    assert outside.layout == inside.layout and outside.stages[1].start in read.layer_starts
    assert outside.predicted.step_seconds != inside.predicted.step_seconds
    export_plan(outside, declared, Target.MEGATRON_LM)


def test_more_stages_than_whole_layers_are_refused() -> None:
    declared = decoder(layers=2)
    with pytest.raises(UserError, match="2 whole layers do not fill 8 pipeline stages"):
        cut_at_layers(
            plan_with(declared, Layout(pp=8), cuts=range(2, 9)),
            declared,
            read_decoder(graph(declared), Target.MEGATRON_LM),
        )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A plan of llama3-8b, on disk."""
    path = tmp_path / "plan.json"
    save(case("llama3-8b")[0], path)
    assert load(path)
    return path


def test_the_command_prints_or_writes(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(saved), "--to", "megatron-lm"]) == 0
    text = capsys.readouterr().out
    assert groups(text)["MODEL"][:2] == ["--num-layers", "32"]
    assert main(["export", str(saved), "--to", "megatron-lm", "-o", str(saved.with_name("run.sh"))]) == 0
    assert saved.with_name("run.sh").read_text() == text and capsys.readouterr().out == ""


def test_the_command_cuts_at_whole_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And says what that takes, where the plan was not cut so."""
    declared, ref = find("llama3-8b")
    starts, path = read_decoder(graph(declared), Target.MEGATRON_LM).layer_starts, str(tmp_path / "plan.json")
    for cut, message in ((starts[16] + 3, "partitioned the stages again, between whole layers: "), (starts[16], "")):
        save(plan_with(declared, Layout(pp=2, tp=4, sequence_parallel=True), cuts=(cut,), ref=ref), path)
        assert main(["export", path, "--to", "megatron-bridge"]) == 0
        output = capsys.readouterr()
        assert "num_layers=32," in output.out
        assert output.err.startswith(message) and ("partitioned" in output.err) is bool(message)
        assert "for Megatron-Bridge, `plan --runtime megatron` searches with the kernels of Megatron-core" in output.err


@pytest.mark.parametrize(("name", "gpus", "fixed"), [("llama3-8b", "64xH100", {"pp": 2}), ("gpt3-13b", "8xH100", {})])
def test_what_is_planned_for_megatron_has_stages_of_whole_layers(name: str, gpus: str, fixed: dict[str, int]) -> None:
    """All that a search shows can be exported as it is; ours, on the same devices, begins stages inside of layers."""
    model, ref = find(name)
    work = Workload(seq=2048, batch=64)
    mine, theirs = (search(model, cluster(gpus), work, ref=ref, fixed=fixed, runtime=run) for run in Runtime)
    read = read_decoder(graph(model), Target.MEGATRON_LM)
    for plan in (theirs.best, *theirs.others):
        assert export_plan(plan, model, Target.MEGATRON_LM) and cut_at_layers(plan, model, read) is plan
    starts = {0, *read.layer_starts}
    assert any(stage.start not in starts for plan in (mine.best, *mine.others) for stage in plan.stages)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "accelerate"], "Accelerate cannot express llama3-8b: its Megatron-LM plugin always trains a GPT-2"),
        (["--to", "deepspeed"], "megatron-lm"),
        (["--to", "slurm", "-o", "/no/such/folder/job"], "cannot write -o '/no/such/folder/job'"),
    ],
)
def test_what_is_wrong_is_said_with_exit_code_2(
    words: list[str], message: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(saved), *words]) == 2
    output = capsys.readouterr()
    assert message in output.err and "Traceback" not in output.err and output.out == ""
