"""Exports of sharded gradients and weights: what each program is told, and what it cannot have."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaloom.dsl import UserError
from megaloom.dsl.catalog import find
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.export.export import export_plan
from megaloom.planner.export.target import Target
from megaloom.runtime.megatron import device
from tests.support.exported import bridge_fields, parsed, plan_with
from tests.support.limits import LIMIT
from tests.support.paths import TESTS

ALWAYS, NEVER = "always", "never"


def exported(target: Target, layout: Layout, name: str = "llama3-8b", **more: Any) -> str:
    """Return the export of a catalogue model on a layout."""
    model, ref = find(name)
    return export_plan(plan_with(model, layout, ref=ref, **more), model, target)


def refused(target: Target, layout: Layout, **more: Any) -> str:
    with pytest.raises(UserError) as error:
        exported(target, layout, **more)
    return str(error.value)


WEIGHTS, GRADIENTS = Layout(dp=8, shard="weights"), Layout(dp=8, shard="gradients")
STEP = Layout(dp=8, shard="weights", reshard="step")
STAGES = {"counts": (16, 16)}


@pytest.mark.parametrize(
    ("layout", "more", "policy"),
    [
        (WEIGHTS, {"batch": 64}, ALWAYS),
        (WEIGHTS, {"batch": 8}, ALWAYS),
        (GRADIENTS, {"batch": 8}, NEVER),
        (Layout(dp=8, shard="optimizer"), {"batch": 8}, NEVER),
        (Layout(dp=4, pp=2, shard="optimizer"), STAGES, NEVER),
        (Layout(dp=4, pp=2, shard="weights", reshard="step"), STAGES, NEVER),
    ],
)
def test_torchtitan_keeps_weights_gathered_for_as_long_as_the_plan(
    layout: Layout, more: dict[str, Any], policy: str
) -> None:
    parallelism = tomllib.loads(exported(Target.TORCHTITAN, layout, **more))["parallelism"]
    assert parallelism["fsdp_reshard_after_forward"] == policy
    assert (parallelism["data_parallel_replicate_degree"], parallelism["data_parallel_shard_degree"]) == (1, layout.dp)


@pytest.mark.parametrize(
    ("layout", "more", "what", "instead"),
    [
        (GRADIENTS, {"batch": 64}, "--shard gradients with 8 micro-batches", "--micro-batch 8"),
        (STEP, {"batch": 64}, "--shard weights --reshard step with 8 micro-batches", "--shard weights, or one"),
        (Layout(dp=8, shard="optimizer"), {"batch": 64}, "--shard optimizer with 8 micro-batches", "--micro-batch 8"),
        (Layout(dp=8), {"batch": 64}, "--shard none with 8 micro-batches", "--shard weights"),
        (Layout(dp=4, pp=2, shard="weights"), STAGES, "--shard weights with pp 2", "--reshard step"),
        (Layout(dp=4, pp=2, shard="gradients"), STAGES, "--shard gradients with pp 2", "--reshard step"),
    ],
)
def test_torchtitan_refuses_what_it_shards_in_another_way(
    layout: Layout, more: dict[str, Any], what: str, instead: str
) -> None:
    message = refused(Target.TORCHTITAN, layout, **more)
    assert what in message and instead in message


def test_torchtitan_says_that_it_gathers_the_weights_of_many_chunks_again() -> None:
    chunks = Layout(dp=4, pp=2, vpp=4, shard="weights", reshard="step")
    assert "weights of 3 at a time" in exported(Target.TORCHTITAN, chunks, counts=(4,) * 8)
    few = Layout(dp=4, pp=2, vpp=2, shard="weights", reshard="step")
    assert "at a time" not in exported(Target.TORCHTITAN, few, counts=(8,) * 4)


@pytest.mark.parametrize(("layout", "strategy"), [(GRADIENTS, "optim_grads"), (WEIGHTS, "optim_grads_params")])
def test_megatron_lm_runs_megatron_fsdp(layout: Layout, strategy: str) -> None:
    """megatron-core's configuration takes the options, and they are those that its guide demands."""
    device.prepare()
    from megatron.core.distributed import DistributedDataParallelConfig

    args = vars(parsed(exported(Target.MEGATRON_LM, layout)))
    known = {f.name for f in fields(DistributedDataParallelConfig)}
    config = DistributedDataParallelConfig(**{name: value for name, value in args.items() if name in known and value})
    assert config.use_megatron_fsdp and config.use_distributed_optimizer
    assert config.overlap_grad_reduce and config.overlap_param_gather
    assert config.data_parallel_sharding_strategy == strategy
    assert args["ckpt_format"] == "fsdp_dtensor" and args["gradient_accumulation_fusion"]
    assert args["init_model_with_meta_device"]


def test_learned_positions_are_not_made_on_the_meta_device() -> None:
    """Megatron-FSDP would give them the standard deviation of torch's Embedding, which is 1."""
    for target, line in (
        (Target.MEGATRON_LM, "--init-model-with-meta-device"),
        (Target.MEGATRON_BRIDGE, "init_model_with_meta_device=True"),
    ):
        assert line in exported(target, WEIGHTS) and line not in exported(target, WEIGHTS, "gpt2", seq=1024)


@pytest.mark.parametrize(
    ("layout", "more", "what", "instead"),
    [
        (STEP, {}, "--shard weights --reshard step", "--shard optimizer"),
        (Layout(dp=4, pp=2, shard="weights"), STAGES, "with pp 2", "--pp 1"),
        (WEIGHTS, {"precision": "fp32"}, "in fp32", "--precision bf16"),
    ],
)
@pytest.mark.parametrize("target", [Target.MEGATRON_LM, Target.MEGATRON_BRIDGE])
def test_megatron_fsdp_refuses(target: Target, layout: Layout, more: dict[str, Any], what: str, instead: str) -> None:
    message = refused(target, layout, **more)
    assert what in message and instead in message


def test_megatron_fsdp_builds_the_meshes_that_are_exported() -> None:
    """Its own function divides 8 ranks as the layouts do; with pipeline stages, which are refused, it cannot."""
    stages = Layout(dp=4, pp=2, shard="weights")
    layouts = (
        WEIGHTS,
        Layout(dp=2, tp=2, cp=2, sequence_parallel=True, shard="weights"),
        Layout(dp=4, tp=2, ep=4, sequence_parallel=True, shard="weights"),
        stages,
    )
    words = [",".join(str(getattr(x, axis)) for axis in ("world", "tp", "pp", "cp", "ep", "etp")) for x in layouts]
    script = [sys.executable, "-W", "ignore", "-m", "tests.support.megatron_fsdp_mesh", *words]
    done = subprocess.run(script, cwd=TESTS.parent, capture_output=True, text=True, timeout=LIMIT)
    *built, failed = done.stdout.splitlines()
    assert built == ["ok"] * 3 and "_get_dp_tp_mesh" in failed, done.stderr
    assert "with pp 2" in refused(Target.MEGATRON_LM, stages, **STAGES)


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        (Layout(dp=2), None),
        (Layout(tp=2, sequence_parallel=True), "export CUDA_DEVICE_MAX_CONNECTIONS=1"),
        (Layout(cp=2), "export CUDA_DEVICE_MAX_CONNECTIONS=1"),
        (Layout(dp=2, tp=2, sequence_parallel=True, shard="weights"), "unset CUDA_DEVICE_MAX_CONNECTIONS"),
        (Layout(dp=2, shard="gradients"), "unset CUDA_DEVICE_MAX_CONNECTIONS"),
        (Layout(dp=2, tp=2, sequence_parallel=True, overlaps=("experts",)), "unset CUDA_DEVICE_MAX_CONNECTIONS"),
    ],
)
def test_connections_are_as_many_as_megatron_lm_accepts(layout: Layout, line: str | None) -> None:
    lines = [x for x in exported(Target.MEGATRON_LM, layout).splitlines() if "CONNECTIONS" in x]
    assert lines == ([line] if line else [])


def test_bridge_is_told_the_format_of_gradients_by_either_field() -> None:
    field = "made.ddp.megatron_fsdp_main_grads_dtype = torch.float32"
    assert field in exported(Target.MEGATRON_BRIDGE, Layout(dp=8, shard="weights"))
    for other in (Layout(dp=8, shard="optimizer"), Layout(dp=8, shard="weights", grad_reduce="bf16")):
        assert "main_grads_dtype" not in exported(Target.MEGATRON_BRIDGE, other)


@pytest.mark.parametrize("layout", [WEIGHTS, GRADIENTS, Layout(dp=8, shard="optimizer"), Layout(dp=8)])
def test_bridge_is_told_whether_it_shards(layout: Layout) -> None:
    fields = bridge_fields(exported(Target.MEGATRON_BRIDGE, layout))
    on = "True" if layout.fsdp else None
    assert fields.get("ddp.use_megatron_fsdp") == fields.get("dist.use_megatron_fsdp") == on
    assert fields.get("checkpoint.ckpt_format") == ("'fsdp_dtensor'" if layout.fsdp else None)
    shards = "True" if layout.shard else None
    assert fields.get("ddp.use_distributed_optimizer") == fields.get("optimizer.use_distributed_optimizer") == shards
    strategies = {2: "'optim_grads'", 3: "'optim_grads_params'"}
    assert fields.get("ddp.data_parallel_sharding_strategy") == strategies.get(layout.shard)


@pytest.mark.parametrize(
    ("layout", "batch", "reshard"),
    [(WEIGHTS, 64, True), (GRADIENTS, 8, False), (Layout(dp=8, shard="weights", recompute=Recompute.FULL), 8, True)],
)
def test_accelerate_launches_fsdp_2(
    layout: Layout, batch: int, reshard: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate launch` reads the file, and its plugin is built from the variables that the launcher sets."""
    import torch
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env
    from torch.distributed.fsdp import MixedPrecisionPolicy

    text = exported(Target.ACCELERATE, layout, "qwen3-8b", batch=batch)
    path = tmp_path / "accelerate.yaml"
    path.write_text(text)
    monkeypatch.setattr("accelerate.commands.launch.is_bf16_available", lambda ignore_tpu=False: True)
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(path), "it.py"]))
    assert args.use_fsdp and args.num_processes == 8 and args.mixed_precision == "bf16"
    for name, value in prepare_multi_gpu_env(args).items():
        monkeypatch.setenv(name, value)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16)
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is reshard
    assert plugin.activation_checkpointing is layout.full_recompute
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
    plugin.set_mixed_precision("bf16")  # as the Accelerator does
    assert plugin.mixed_precision_policy.reduce_dtype is torch.float32
    assert "MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16)" in text
    assert ("GradientAccumulationPlugin(num_steps=8, sync_each_batch=True)" in text) is (batch == 64)
    assert yaml.safe_load(text)["fsdp_config"].keys() <= {name for name in vars(args) if name.startswith("fsdp_")}


@pytest.mark.parametrize(
    ("layout", "what", "instead"),
    [
        (Layout(dp=2, tp=2, pp=2, shard="weights"), "tp 2 beside FSDP; pp 2 beside FSDP", "--tp 1 --pp 1"),
        (STEP, "--reshard step", "--reshard micro-batch"),
        (GRADIENTS, "--shard gradients with 64 micro-batches", "--shard weights"),
        (Layout(dp=8, shard="weights", recompute=Recompute.SELECTIVE), "selective", "--recompute none"),
    ],
)
def test_accelerate_refuses(layout: Layout, what: str, instead: str) -> None:
    message = refused(Target.ACCELERATE, layout, **(STAGES if layout.pp > 1 else {}))
    assert what in message and instead in message


def test_replicas_are_those_of_each_program() -> None:
    """Two replicas share state over four ranks each; the Megatron programs call them instances."""
    x, batch = Layout(dp=8, shard="weights", replicas=2), {"batch": 8}
    parallelism = tomllib.loads(exported(Target.TORCHTITAN, x, **batch))["parallelism"]
    assert [parallelism[f"data_parallel_{kind}_degree"] for kind in ("replicate", "shard")] == [2, 4]
    assert vars(parsed(exported(Target.MEGATRON_LM, x)))["num_distributed_optimizer_instances"] == "2"
    assert "num_distributed_optimizer_instances=2,\n" in exported(Target.MEGATRON_BRIDGE, x)
    config = yaml.safe_load(exported(Target.ACCELERATE, x))["parallelism_config"]
    assert [config[f"parallelism_config_dp_{kind}_size"] for kind in ("replicate", "shard")] == [2, 4]
    experts = Layout(dp=8, ep=2, shard="weights", replicas=2)
    assert "replicas of a model with experts" in refused(Target.MEGATRON_LM, experts, name="mixtral-8x7b")
    split = Layout(dp=2, cp=2, shard="weights", replicas=4)
    assert "4 replicas of dp 2" in refused(Target.TORCHTITAN, split, batch=2)
    assert "the runtime does not run 2 replicas" in refused(Target.SLURM, x)


@pytest.mark.parametrize("target", [Target.MEGATRON_LM, Target.MEGATRON_BRIDGE, Target.TORCHTITAN])
@pytest.mark.parametrize("shards", [("weights", "optimizer"), ("optimizer", "weights")])
def test_experts_that_are_sharded_otherwise_are_refused(target: Target, shards: tuple[str, str]) -> None:
    shard, expert_shard = shards
    layout = Layout(dp=8, ep=4, shard=shard, expert_shard=expert_shard, vocab_multiple=1)
    message = refused(target, layout, name="qwen3-30b-a3b")
    assert f"--expert-shard {expert_shard}" in message and "for all weights" in message
    assert "--expert-shard same" in message


@pytest.mark.parametrize("target", [Target.SLURM, Target.KUBERNETES, Target.SKYPILOT])
def test_a_job_of_our_own_runtime_has_the_plan_itself(target: Target) -> None:
    assert "megaloom.runtime.cli train" in exported(target, WEIGHTS)
