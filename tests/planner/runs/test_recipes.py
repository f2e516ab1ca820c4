"""Python recipes: configurations of torchtitan and Megatron-Bridge, evaluated without importing anything."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.dsl.facts.parameters import params
from megaloom.planner.contract.choices import Recompute, Shard
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.runs.opinion import Opinion
from megaloom.planner.runs.read import RunInputs, read_file, read_text
from megaloom.planner.runs.run import TrainingRun
from megaloom.planner.runs.text import opinion_text

TITAN = """
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.trainer import Trainer
from . import model_registry

raise SystemError("this file was run")

def llama3_8b() -> Trainer.Config:
    spec = model_registry("8B")
    return Trainer.Config(
        model_spec=spec,
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 4096, max_context_length=4096, steps=10),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
    )

def llama3_8b_wide() -> Trainer.Config:
    config = llama3_8b()
    config.parallelism.data_parallel_replicate_degree = 2
    config.training.num_tokens_per_train_step = 4096 * 64
    return config

def llama3_8b_selective() -> Trainer.Config:
    config = llama3_8b()
    config.activation_checkpoint = SelectiveAC.Config()
    return config
"""
COMMON = """
import os
from megatron.bridge.training.config import ConfigContainer, TrainingConfig, DDPConfig

def _common() -> ConfigContainer:
    return ConfigContainer(
        model=None,
        train=TrainingConfig(train_iters=10, global_batch_size=32, micro_batch_size=2),
        ddp=DDPConfig(overlap_grad_reduce=True, overlap_param_gather=True, use_distributed_optimizer=True),
        mixed_precision="bf16_mixed",
        comm_overlap=None,
    )
"""
RECIPE = """
from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _common
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.mixed_precision import bf16_mixed

LONG = 2 * 2048
STAGES = {(4, 1): [["embedding"] + ["decoder"] * 8] + [["decoder"] * 8] * 2 + [["decoder"] * 8 + ["loss"]]}

def llama_pretrain_16gpu_config() -> ConfigContainer:
    cfg = _common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_size = 4
    cfg.model.sequence_parallel = True
    cfg.model.seq_length = LONG
    cfg.model.recompute_granularity = None
    cfg.model.pipeline_model_parallel_layout = STAGES[(cfg.model.pipeline_model_parallel_size or 1, 1)]
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)
    cfg.mixed_precision = bf16_mixed()
    return cfg

def llama_long_pretrain_config(seq: int = 4 * LONG) -> ConfigContainer:
    cfg = llama_pretrain_16gpu_config()
    cfg.model.seq_length = seq
    cfg.model.context_parallel_size = 2
    return cfg

def llama_peft_config() -> ConfigContainer:
    cfg = llama_pretrain_16gpu_config()
    cfg.peft = LoRA(dim=8)
    return cfg
"""
SCRIPT = """
import argparse
import os
from megatron.bridge.recipes.llama import llama_pretrain_16gpu_config as make
from megatron.bridge.training.pretrain import pretrain

def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--fast", action="store_true")
    args = parser.parse_args()
    cfg = make()
    cfg.train.micro_batch_size = args.micro_batch
    if args.fast:
        cfg.model.tensor_model_parallel_size = 8
    cfg.train.global_batch_size = int(os.environ.get("BATCH", "64"))
    for name in ("a", "b"):
        print(f"{name}: {cfg.train}")
    pretrain(config=cfg, forward_step_func=None)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def bridge(tmp_path: Path) -> Path:
    """Return a folder with a script beside a clone of a framework's recipes."""
    recipes = tmp_path / "src" / "megatron" / "bridge" / "recipes"
    recipes.mkdir(parents=True)
    for folder in (recipes, recipes.parent, recipes.parent.parent):
        (folder / "__init__.py").write_text("")
    (recipes / "common.py").write_text(COMMON)
    (recipes / "llama.py").write_text(RECIPE)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def run(path: Path | str, command: str | None = None, *words: str, devices: int | None = 16, **env: str) -> TrainingRun:
    """Return the run of a file; words stand after `--`."""
    return read_file(str(path), RunInputs(devices=devices, command=command, positional=words, environment=env))


def titan(name: str | None, *words: str) -> TrainingRun:
    """Return the run of a function of torchtitan's registry, with words of its command line."""
    return read_text(TITAN, "llama3/config_registry.py", RunInputs(devices=32, command=name, positional=words))


NEWEST = """
import os
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

def mine() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry(flavor="8B", attn_backend="varlen"),
        training=TrainingConfig(local_batch_size=8, global_batch_size=64, seq_len=4096),
        parallelism=ParallelismConfig(
            tensor_parallel_degree=2,
            pipeline_parallel_degree=2,
            pipeline_parallel_schedule="Interleaved1F1B",
            pipeline_parallel_microbatch_size=2,
            pipeline_parallel_layers_per_stage=9,
        ),
        activation_checkpoint=None,
        compile=CompileConfig(enable=True),
    )
"""


def newest(old: str = "", new: str = "", *words: str) -> TrainingRun:
    """Return the run of a configuration of torchtitan 0.3.0, of which a text is replaced by another."""
    assert old in NEWEST
    return read_text(NEWEST.replace(old, new), "mine.py", RunInputs(devices=32, positional=words))


def test_batches_and_stages_of_torchtitan_0_3_are_read() -> None:
    read = newest()
    x = read.layout
    assert (x.tp, x.pp, x.vpp, x.dp, x.micro_batch, x.sequence_parallel) == (2, 2, 2, 8, 2, True)
    assert (x.shard, x.recompute) == (Shard.OPTIMIZER, Recompute.NONE)
    assert (read.workload.seq, read.workload.batch) == (4096, 64)
    wide = newest("", "", "--training.local-batch-size", "4", "--parallelism.enable_sequence_parallel=false")
    assert (wide.layout.sequence_parallel, wide.layout.micro_batch) == (False, 2)
    assert newest("", "", "activation-checkpoint:full").layout.recompute is Recompute.FULL
    later = newest("local_batch_size=8, global_batch_size=64, seq_len=4096", "max_context_length=4096")
    assert (later.workload.seq, later.layout.micro_batch, later.workload.batch) == (4096, 4, 32)  # 16,384 tokens


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('attn_backend="varlen"', "num_mtp_layers=1", "num_mtp_layers 1"),
        ('attn_backend="varlen"', "converters=[MXFP8LinearConverter.Config()]", "mxfp8linearconverter is not modelled"),
        ("tensor_parallel_degree=2", "tensor_parallel_size=2", "tensor_parallel_size of torchtitan is not known"),
        ("tensor_parallel_degree=2", "tensor_parallel_degree=int(os.getenv('TP'))", "TP, which is not known"),
        ("training=TrainingConfig(", "training=ours(", "training is no TrainingConfig"),
        ("activation_checkpoint=None", "activation_checkpoint=Ours.Config()", "activation_checkpoint is none of"),
        ("seq_len=4096", "seq_len=4096, enable_cpu_offload=True", "host memory"),
        ("seq_len=4096", 'seq_len=4096, dtype="bfloat16"', "in bf16 alone"),
        ("local_batch_size=8", "max_context_length=3000", "no whole number of sequences"),
        ("pipeline_parallel_microbatch_size=2", "pipeline_parallel_microbatch_size=''", "a whole number above 0"),
        (
            "tensor_parallel_degree=2",
            "tensor_parallel_degree=1, context_parallel_degree=2, context_parallel_load_balancer=None",
            "head-tail",
        ),
    ],
)
def test_what_torchtitan_0_3_does_otherwise_is_refused_by_name(old: str, new: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        newest(old, new)


def head_line(run: TrainingRun) -> str:
    """Return the first line of the opinion on a run, without its path."""
    opinion = Opinion(run=run, cluster=cluster("32xH100"), broken=())
    return opinion_text(opinion).partition("\n")[0].partition(": ")[2]


def test_the_head_line_names_the_framework_and_its_release(bridge: Path) -> None:
    defaults = "(defaults of Megatron-LM 0.16.1) on 32xH100"
    assert head_line(newest()) == f"torchtitan 0.3 {defaults}"
    assert head_line(titan("llama3_8b")) == f"torchtitan after 0.3 {defaults}"
    assert head_line(newest("\nimport os", "# For torchtitan 0.3.0\nimport os")).startswith("torchtitan 0.3.0 (")
    recipe = bridge / "src/megatron/bridge/recipes/llama.py"
    assert head_line(run(recipe, "llama_pretrain_16gpu_config")) == f"Megatron-Bridge {defaults}"
    package = bridge / "src/megatron/bridge/package_info.py"
    package.write_text("raise SystemError\nMAJOR = 0\nMINOR = 7\nPATCH = 1\n")
    assert head_line(run(recipe, "llama_pretrain_16gpu_config")) == f"Megatron-Bridge 0.7.1 {defaults}"


def test_async_tensor_parallelism_of_torchtitan_is_named_as_left_out() -> None:
    notes = newest("CompileConfig(enable=True", "CompileConfig(enable=True, enable_async_tensor_parallel=True").notes
    assert any("enable_async_tensor_parallel" in note.text for note in notes)
    assert not any("enable_async_tensor_parallel" in note.text for note in newest().notes)


def test_a_configuration_of_torchtitan_is_read_with_the_changes_to_it() -> None:
    x, work = titan("llama3_8b").layout, titan("llama3_8b").workload
    assert (x.tp, x.dp, x.micro_batch, x.shard, x.recompute) == (2, 16, 2, Shard.WEIGHTS, Recompute.FULL)
    assert (work.seq, work.batch) == (4096, 32)
    wide = titan("llama3_8b_wide")
    assert (wide.layout.replicas, wide.workload.batch) == (2, 64)
    assert params(titan("llama3_8b").model) == params(find("llama3-8b")[0])


def test_options_of_the_command_line_count_more_than_the_file() -> None:
    x = titan("llama3_8b", "--parallelism.tensor_parallel_degree", "4", "--activation_checkpoint.mode=none").layout
    assert (x.tp, x.recompute) == (4, Recompute.NONE)


def test_facts_have_the_line_of_the_function_that_states_them() -> None:
    facts = {fact.name: fact.origin for fact in titan("llama3_8b_wide").stated}
    lines = TITAN.splitlines()
    assert facts["tp"] and "tensor_parallel_degree=2" in lines[facts["tp"].line_number - 1]
    assert facts["batch"] and "num_tokens_per_train_step" in lines[facts["batch"].line_number - 1]


def test_a_recipe_is_read_over_the_files_that_it_calls(bridge: Path) -> None:
    read = run(bridge / "src" / "megatron" / "bridge" / "recipes" / "llama.py", "llama_pretrain_16gpu_config")
    x = read.layout
    assert (x.tp, x.pp, x.dp, x.micro_batch, x.shard) == (2, 4, 2, 2, Shard.OPTIMIZER)
    assert (read.workload.seq, read.workload.batch, read.workload.precision) == (4096, 32, "bf16")
    assert len(read.stages) == 4 and x.sequence_parallel and "tensor" in x.overlaps
    assert params(read.model) == params(find("llama3-8b")[0])


def test_defaults_of_arguments_and_overrides(bridge: Path) -> None:
    recipe = bridge / "src" / "megatron" / "bridge" / "recipes" / "llama.py"
    assert run(recipe, "llama_long_pretrain_config").workload.seq == 16384
    changed = run(recipe, "llama_long_pretrain_config", "train.global_batch_size=8", "model.context_parallel_size=1")
    assert (changed.workload.batch, changed.layout.cp) == (8, 1)


def test_a_script_is_its_main_function_with_the_defaults_of_its_options(bridge: Path) -> None:
    read = run(bridge / "train.py")
    assert (read.layout.tp, read.layout.micro_batch, read.workload.batch) == (2, 1, 64)
    assert run(bridge / "train.py", BATCH="16").workload.batch == 16


def test_a_command_with_a_recipe_and_overrides(bridge: Path) -> None:
    (bridge / "run.sh").write_text(
        "torchrun --nnodes 2 --nproc_per_node 8 run.py --recipe llama_pretrain_16gpu_config model.seq_length=1024"
    )
    read = run(bridge / "run.sh", devices=None)
    assert (read.workload.seq, read.devices.count, read.layout.pp) == (1024, 16, 4)
    (bridge / "run.sh").write_text("torchrun --nproc_per_node 8 run_recipe.py --recipe gone_config")
    with pytest.raises(UserError, match="the file of the configuration gone_config of Megatron-Bridge is not there"):
        run(bridge / "run.sh", devices=None)


def test_a_command_of_torchtitan(tmp_path: Path) -> None:
    folder = tmp_path / "torchtitan" / "models" / "llama3"
    folder.mkdir(parents=True)
    (folder / "config_registry.py").write_text(TITAN)
    (tmp_path / "run.sh").write_text(
        'torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config ${CONFIG:-llama3_8b} "$@"'
    )
    read = run(tmp_path / "run.sh", None, "--parallelism.tensor_parallel_degree=8", devices=None)
    assert (read.layout.tp, read.devices.count) == (8, 8)
    assert run(tmp_path / "run.sh", devices=32, CONFIG="llama3_8b_wide").layout.replicas == 2


@pytest.mark.parametrize(
    ("text", "command", "message"),
    [
        (TITAN, None, r"has 3 configurations\ngive the one to read: --command NAME\n  llama3_8b\n"),
        (TITAN, "other", r"has no function other"),
        (TITAN, "llama3_8b_selective", "activation checkpointing `selective`"),
        (
            RECIPE,
            "llama_long_pretrain_config",
            r"x\.py:12: what _common sets is not known, since its file is not there",
        ),
        ("import os\n", None, "which is not read: no recipe"),
        ("import torchtitan\ndef f(:\n", None, r"x\.py:2: this line is not Python"),
        ("import torchtitan\n", None, "has no function that returns a configuration"),
        (
            "from megatron.bridge import a\na.pretrain(1)\n",
            None,
            "starts no training with a configuration that is known",
        ),
        ("import torchtitan\ndef f() -> Config:\n  while 1: pass\n  for i in range(9): f()\n", None, "too deeply"),
    ],
)
def test_what_cannot_be_known_is_refused_by_name(text: str, command: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_text(text, "llama3/x.py", RunInputs(devices=8, command=command))


def test_a_condition_that_is_not_known(bridge: Path) -> None:
    recipe = bridge / "src" / "megatron" / "bridge" / "recipes" / "llama.py"
    unknown = "    if torch.cuda.is_available() == os.cpu_count():\n        {}\n    return cfg\n"
    for inside, message in (
        ("cfg.model.tensor_model_parallel_size = 8", "the value of --tensor-model-parallel-size depends on condition"),
        ("return other", "which configuration is returned depends on condition"),
        ("cfg.checkpoint.save = 'x'", ""),
    ):
        recipe.write_text(RECIPE.replace("    return cfg\n", unknown.format(inside), 1))
        if not message:
            assert run(recipe, "llama_pretrain_16gpu_config").layout.tp == 2
            continue
        with pytest.raises(UserError, match=message):
            run(recipe, "llama_pretrain_16gpu_config")


def test_adapters_are_refused(bridge: Path) -> None:
    with pytest.raises(UserError, match="adapters of Megatron-Bridge are not modelled"):
        run(bridge / "src" / "megatron" / "bridge" / "recipes" / "llama.py", "llama_peft_config")


PIECES = st.sampled_from(
    [
        "cfg", "=", ".", "model", "(", ")", "[", "]", "{", "}", ":", "\n", "    ", "return", "if", "for", "in", "x",
        "1", "2 ** 9", "'a'", "* 99", "+", ",", "f'{x}'", "range(9)", "dict", ".get", "not", "is None", "getattr",
    ]
)  # fmt: skip


@given(st.lists(PIECES, max_size=30).map(" ".join))
def test_no_text_makes_the_reader_fail(body: str) -> None:
    text = f"import torchtitan\ndef f(x=1) -> Config:\n    cfg = x\n    {body}\n    return cfg\n"
    with suppress(UserError):
        read_text(text, "x.py", RunInputs(devices=8))
