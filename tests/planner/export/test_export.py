"""Exports: golden files of four plans, and that the programs that they are for would take them."""

from __future__ import annotations

import os
import subprocess
import tomllib
from ast import literal_eval
from dataclasses import fields
from itertools import accumulate, chain, pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from megaloom.dsl import Model, UserError, graph
from megaloom.dsl.catalog import examples, find
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Runtime
from megaloom.planner.export.decoder import read_decoder
from megaloom.planner.export.export import export_plan
from megaloom.planner.export.slurm import machines
from megaloom.planner.export.target import Target
from megaloom.planner.export.whole_layers import StageLayers, pipeline_layout
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.runtime.megatron import device
from tests.support.exported import (
    CASES,
    bridge_fields,
    case,
    groups,
    parsed,
    parser,
    plan_with,
)
from tests.support.limits import LIMIT
from tests.support.models.examples import example
from tests.support.paths import TESTS

GOLDEN = TESTS / "golden"


def exported_text(plan: Plan, model: Model, target: Target) -> str:
    """The export, or why there is none."""
    try:
        return export_plan(plan, model, target)
    except UserError as error:
        return f"refused: {error}\n"


def agrees(path: Path, text: str, request: pytest.FixtureRequest) -> bool:
    """Return True if a golden file has this text; with --update, write the text into it."""
    if request.config.getoption("--update"):
        path.write_text(text)
    return text == path.read_text()


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    plan, model = case(name)
    text = "".join(f"===== {target}\n{exported_text(plan, model, target)}\n" for target in Target)
    assert agrees(GOLDEN / f"export_{name}.txt", text, request)


def test_which_examples_megatron_lm_can_express(request: pytest.FixtureRequest) -> None:
    """Each becomes a command line that Megatron-LM's parser takes, or is refused by a name in it."""
    lines: dict[str, str] = {}
    for name, ref in examples().items():
        model = example(name)
        text = exported_text(plan_with(model, Layout(dp=8)), model, Target.MEGATRON_LM)
        if exported := not text.startswith("refused: Megatron-LM cannot express "):
            assert parsed(text).num_layers == str(len(read_decoder(graph(model), Target.MEGATRON_LM).layers))
        lines.setdefault(ref.partition(":")[0], f"{name}: {'exported' if exported else text.splitlines()[0]}\n")
    assert agrees(GOLDEN / "export_families.txt", "".join(lines.values()), request)  # one of each family


@pytest.mark.parametrize("name", CASES)
def test_every_option_that_megatron_lm_needs_is_there_with_any_training(name: str) -> None:
    """core_v0.16.0 and later divide by --eval-interval, which has no default, before the first step."""
    plan, model = case(name)
    arrays = groups(export_plan(plan, model, Target.MEGATRON_LM))
    args = parser().parse_args([*arrays["MODEL"], *arrays["LAYOUT"], *arrays["STEP"], "--train-iters", "5000"])
    assert (args.eval_interval, args.eval_iters, args.log_interval) == ("1000", "0", "1")
    assert int(args.train_iters) // int(args.eval_interval) == 5


def test_the_parser_refuses_what_megatron_lm_has_not() -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--virtual-pipeline-model-parallel-size", "2"])


@pytest.mark.parametrize("name", CASES)
def test_a_script_starts_what_it_says_on_every_machine(name: str, tmp_path: Path) -> None:
    """Run with a torchrun that prints its arguments, one a line: quotes and arrays come out as they were meant."""
    plan, model = case(name)
    script = export_plan(plan, model, Target.MEGATRON_LM)
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MEGATRON": "/m", "MASTER_ADDR": "node0"}

    def run(*given: str) -> list[str]:
        done = subprocess.run(
            ["bash", "-c", script, "it", *given], env=env, capture_output=True, text=True, timeout=LIMIT
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    words = [word for group in groups(script).values() for word in group]
    nodes, each = machines(plan.cluster)
    usual = run()
    assert usual[:4] == ["--nnodes", str(nodes), "--nproc-per-node", str(each)] and nodes * each == plan.cluster.count
    assert usual[usual.index("/m/pretrain_gpt.py") + 1 :] == words
    assert run("--data-path", "a b")[-2:] == ["--data-path", "a b"] and "--mock-data" not in run("--data-path", "a b")


def known_options(args: Any) -> dict[str, Any]:
    """The options that were given, their values as numbers where they are numbers."""
    out: dict[str, Any] = {}
    for dest, value in vars(args).items():
        if value is not None and value is not False:
            values = [_number(v) for v in value] if isinstance(value, list) else _number(value)
            out[dest] = values
    return out


def _number(value: Any) -> Any:
    try:
        return literal_eval(value)
    except (ValueError, SyntaxError):
        return value


@pytest.mark.parametrize("name", CASES)
def test_megatron_core_builds_the_stages_of_the_plan(name: str) -> None:
    """Its configuration takes the options, and gives each rank and chunk as many layers as the plan does."""
    device.prepare()
    import torch
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    plan, model = case(name)
    args = known_options(parsed(export_plan(plan, model, Target.MEGATRON_LM)))
    kind = MLATransformerConfig if args.get("multi_latent_attention") else TransformerConfig
    known = {f.name for f in fields(kind)}
    config = {dest: value for dest, value in args.items() if dest in known}
    for many in ("moe_aux_loss_coeff", "moe_router_load_balancing_type"):
        if many in config:
            (config[many],) = config[many]
    if "moe_layer_freq" in args:
        config["moe_layer_freq"] = eval(args["moe_layer_freq"])
        assert len(config["moe_layer_freq"]) == args["num_layers"]
    chunks = plan.layout.vpp if plan.layout.vpp > 1 else None
    config |= {"num_moe_experts": args.get("num_experts"), "virtual_pipeline_model_parallel_size": chunks}
    built = kind(**config, pipeline_dtype=torch.bfloat16)
    stages = built.pipeline_model_parallel_layout
    if stages is not None:
        stages.validate_layer_layout(args["num_layers"], args.get("mtp_num_layers"))
    read = read_decoder(graph(model), Target.MEGATRON_LM)
    kinds = [*[LayerType.decoder] * len(read.layers), *[LayerType.mtp] * read.mtp, LayerType.loss]
    for stage in plan.stages:
        stage_kinds = [
            kind for kind, start in zip(kinds, read.layer_starts, strict=True) if stage.start <= start < stage.stop
        ]
        layers = stage_kinds.count(LayerType.decoder)
        if stages is not None:
            assert stages.layout[stage.rank][stage.chunk] == [LayerType.embedding] * (stage.start == 0) + stage_kinds
        else:
            assert get_num_layers_to_build(built, stage.chunk if chunks else None, stage.rank) == layers


@given(
    st.integers(0, 9),
    st.lists(st.sampled_from([1, 2, 2, 2, 3, 4, 12]), max_size=40),
    st.integers(0, 9),
    st.sampled_from(["", "m", "m|"]),
)
def test_megatron_core_reads_back_the_stages(first: int, between: list[int], last: int, ahead: str) -> None:
    """Whatever the runs of equal stages; the first and the last may have no layers at all. What predicts a token ahead
    is with the heads, or in the stage before.
    """
    device.prepare()
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    bounds = [*accumulate([first, *between, last], initial=0)]
    cut = [StageLayers(a, b, a == 0 and i == 0, i == len(between) + 1) for i, (a, b) in enumerate(pairwise(bounds))]
    cut[-1] = evolve(cut[-1], mtp=len(ahead) % 2)
    if ahead == "m|":
        cut[-1:] = [evolve(cut[-1], head=False, mtp=1), StageLayers(bounds[-1], bounds[-1], False, True)]
    read = PipelineParallelLayerLayout.parse_str_to_list(pipeline_layout(cut))
    letters = [
        "".join({"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}[x.name] for x in one) for one in read
    ]
    assert "|".join(letters) == "|".join(["E" + "t" * first, *("t" * n for n in between), "t" * last + ahead + "L"])


@pytest.mark.parametrize("name", CASES)
def test_bridge_sets_fields_of_megatron_core(name: str) -> None:
    device.prepare()
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    plan, model = case(name)
    written = bridge_fields(export_plan(plan, model, Target.MEGATRON_BRIDGE))
    provider = {  # fields of Megatron-Bridge's GPTModelProvider
        *("seq_length", "make_vocab_size_divisible_by", "share_embeddings_and_output_weights"),
        *("position_embedding_type", "transformer_layer_spec"),
    }
    known = {f.name for f in fields(MLATransformerConfig)} | provider
    assert {key.removeprefix("model.") for key in written if key.startswith("model.")} <= known
    assert written["model.pipeline_model_parallel_size"] == str(plan.layout.pp)
    assert written["train.global_batch_size"] == str(plan.workload.batch)


# The keys of `megatron_lm_config` that `accelerate launch` 1.15.0 knows (commands/launch.py).
ACCELERATE = {
    *(f"{axis}_degree" for axis in ("tp", "pp")),
    *(f"{what}_parallel_size" for what in ("context", "expert_model", "expert_tensor")),
    *(f"recompute_{what}" for what in ("activations", "granularity", "method", "num_layers")),
    *("num_micro_batches", "sequence_parallelism", "decoder_last_pipeline_num_layers", "use_distributed_optimizer"),
    *("attention_dropout", "hidden_dropout", "use_rotary_position_embeddings"),
}


@pytest.mark.parametrize(
    ("recompute", "method", "layers"), [(Recompute.NONE, "block", 0), (Recompute.FULL, "uniform", 1)]
)
def test_accelerate_is_told_what_it_would_guess_wrong(recompute: Recompute, method: str, layers: int) -> None:
    model, _ = find("gpt2")
    x = Layout(dp=2, tp=2, pp=2, cp=1, micro_batch=2, recompute=recompute)
    config = yaml.safe_load(export_plan(plan_with(model, x, counts=(7, 5)), model, Target.ACCELERATE))
    keys = {key.removeprefix("megatron_lm_"): value for key, value in config["megatron_lm_config"].items()}
    assert config["distributed_type"] == "MEGATRON_LM" and config["num_processes"] == 8
    assert keys.keys() <= ACCELERATE
    assert keys["context_parallel_size"] == 1 and keys["use_rotary_position_embeddings"] is False
    assert (keys["recompute_granularity"], keys["recompute_method"], keys["recompute_num_layers"]) == (
        "full",
        method,
        layers,
    )
    assert keys["num_micro_batches"] == 512 // (2 * 2) and keys["decoder_last_pipeline_num_layers"] == 5


def test_accelerate_on_several_machines_says_where_they_meet() -> None:
    model, _ = find("gpt2")
    config = yaml.safe_load(export_plan(plan_with(model, Layout(dp=8, tp=2)), model, Target.ACCELERATE))
    assert (config["num_machines"], config["num_processes"], config["machine_rank"]) == (2, 16, 0)


# The keys of torchtitan 0.2.2 (config/job_config.py) in the tables that are written.
TORCHTITAN = {
    "model": {"name", "flavor"},
    "training": {"local_batch_size", "global_batch_size", "seq_len", "mixed_precision_param"},
    "parallelism": {
        *(f"data_parallel_{kind}_degree" for kind in ("replicate", "shard")),
        *(f"{kind}_parallel_degree" for kind in ("tensor", "context", "expert", "expert_tensor", "pipeline")),
        *(f"pipeline_parallel_{what}" for what in ("schedule", "microbatch_size")),
        *("fsdp_reshard_after_forward", "module_fqns_per_model_part"),
    },
    "activation_checkpoint": {"mode"},
    "compile": {"enable", "components"},
}


@pytest.mark.parametrize("name", ["llama3-8b", "deepseek-v3"])
def test_torchtitan_has_the_stages_of_the_plan(name: str) -> None:
    plan, model = case(name)
    x = plan.layout
    config = tomllib.loads(export_plan(plan, model, Target.TORCHTITAN))
    ring = {"context_parallel_rotate_method"} if x.cp > 1 else set()
    assert {t: set(keys) for t, keys in config.items()} == {
        **TORCHTITAN,
        "parallelism": TORCHTITAN["parallelism"] | ring,
    }
    modules = config["parallelism"]["module_fqns_per_model_part"]
    assert [sum("layers" in one for one in part) for part in modules] == list(CASES[name][2])
    layers = [f"layers.{i}" for i in range(sum(CASES[name][2]))]
    assert [*chain.from_iterable(modules)] == ["tok_embeddings", *layers, "norm", "output"]
    assert config["training"]["local_batch_size"] == plan.workload.batch // x.dp  # a pipeline gets all at once
    parallelism = config["parallelism"].items()
    assert prod(n for key, n in parallelism if key.endswith("degree") and "expert" not in key) == x.world


def test_torchtitan_replicates_weights_where_they_are_whole() -> None:
    model, _ = find("llama3-8b")
    config = tomllib.loads(
        export_plan(plan_with(model, Layout(dp=8, micro_batch=2), batch=16), model, Target.TORCHTITAN)
    )
    p, t = config["parallelism"], config["training"]
    assert (p["data_parallel_replicate_degree"], p["data_parallel_shard_degree"]) == (8, 1)
    assert (t["local_batch_size"], t["global_batch_size"]) == (2, 16)


def submitted(script: str, tmp_path: Path, *given: str) -> list[str]:
    """Return the commands that a Slurm job starts, with a fake srun and a fake scontrol of two nodes."""
    for name, line in (("srun", 'printf "%s\\n" "$@"'), ("scontrol", "printf 'n0\\nn1\\n'")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[0-1]",
        "SLURM_CPUS_ON_NODE": "112",
    }
    done = subprocess.run(["bash", "-c", script, "it", *given], env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_slurm_starts_megaloom_on_every_machine(tmp_path: Path) -> None:
    plan, model = case("deepseek-v3")
    script = export_plan(plan, model, Target.SLURM, "runs/a plan.json")
    words = submitted(script, tmp_path, "--steps", "9")
    assert "#SBATCH --nodes=128\n" in script and "#SBATCH --gpus-per-node=4\n" in script  # an NVL72 is 18 machines
    assert words[:3] == ["--kill-on-bad-exit=1", "--cpus-per-task=112", "torchrun"] and "n0:29500" in words
    assert words[3:7] == ["--nnodes", "128", "--nproc-per-node", "4"]
    assert words[-6:] == ["-m", "megaloom.runtime.cli", "train", "runs/a plan.json", "--steps", "9"]


def test_slurm_starts_megatron_lm_if_the_plan_is_for_it(tmp_path: Path) -> None:
    plan, model = case("deepseek-v3")
    theirs = evolve(plan, runtime=Runtime.MEGATRON)
    script, alone = (export_plan(theirs, model, target) for target in (Target.SLURM, Target.MEGATRON_LM))
    words = submitted(script, tmp_path, "--data-path", "a b")
    assert script.startswith("#!/usr/bin/env bash\n#SBATCH --job-name=deepseek-v3\n#SBATCH --nodes=128\n")
    assert words[:3] == ["--kill-on-bad-exit=1", "--cpus-per-task=112", "torchrun"] and "n0:29500" in words
    assert words[3:7] == ["--nnodes", "128", "--nproc-per-node", "4"]
    assert words[-2:] == ["--data-path", "a b"] and groups(script) == groups(alone)


@pytest.mark.parametrize(
    ("gpus", "result"), [("64xH100", (8, 8)), ("144xGB200", (36, 4)), ("4xA100", (1, 4)), ("6xCPU", (1, 6))]
)
def test_machines_are_counted_as_launchers_count_them(gpus: str, result: tuple[int, int]) -> None:
    assert machines(cluster(gpus)) == result
