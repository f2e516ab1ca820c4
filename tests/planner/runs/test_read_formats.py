"""Runs of files that are no plain scripts of Megatron-LM: settings, command lines of settings, DeepSpeed, slime."""

from pathlib import Path

import pytest

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_form import fingerprint
from megaloom.planner.contract.choices import Shard
from megaloom.planner.runs.read import RunInputs, read_text
from megaloom.planner.runs.run import TrainingRun

MODEL = "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512"
BATCH = "--micro-batch-size 1 --global-batch-size 64 --vocab-size 1000 --tokenizer-type NullTokenizer"


def run(text: str, path: str = "run.sh", devices: int | None = 8) -> TrainingRun:
    """Return the run of a text."""
    return read_text(text, path, RunInputs(devices=devices))


def test_a_settings_file_is_the_run_of_its_flags() -> None:
    pytest.importorskip("yaml")
    text = """
trainer: {num_nodes: 2, devices: 8, precision: bf16}
model:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  micro_batch_size: 1
  global_batch_size: 64
  encoder_seq_length: 512
  num_layers: 4
  hidden_size: 256
  num_attention_heads: 8
  max_position_embeddings: 512
  tokenizer: {library: megatron, type: GPT2BPETokenizer}
"""
    read = run(text, "run.yaml", None)
    flags = f"{MODEL} --micro-batch-size 1 --global-batch-size 64 --tokenizer-type GPT2BPETokenizer --bf16"
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    script = run(f"torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py {flags} {layout}", devices=None)
    assert (read.layout, read.workload) == (script.layout, script.workload)
    assert fingerprint(read.model) == fingerprint(script.model)
    assert read.layout.dp == 4


def test_the_stage_of_deepspeed_is_read_from_the_file_that_the_script_makes(tmp_path: Path) -> None:
    (tmp_path / "template.json").write_text('{"zero_optimization": {"stage": ZERO_STAGE}, "steps_per_print": SIZE}')
    text = f"""ZERO=1
sed "s/ZERO_STAGE/$ZERO/" template.json | sed "s/SIZE/4/" > ds.json
deepspeed --num_gpus 8 pretrain_gpt.py {MODEL} {BATCH} --fp16 --deepspeed --deepspeed_config ds.json
"""
    path = str(tmp_path / "run.sh")
    assert run(text, path, None).layout.shard is Shard.OPTIMIZER
    assert run(text.replace("ZERO=1", "ZERO=0"), path, None).layout.shard is Shard.NONE
    with pytest.raises(UserError, match="ZeRO stage"):
        run(text.replace("template.json", "gone.json"), path)


def test_runs_without_sizes_are_refused_by_name() -> None:
    verl = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
    with pytest.raises(UserError, match=r"run\.sh:1: verl trains org/m, of which the sizes are not known"):
        run(verl + "actor_rollout_ref.model.path=org/m")


def test_a_model_that_is_only_named_has_its_published_sizes() -> None:
    verl = """python3 -m verl.trainer.main_ppo trainer.nnodes=1 trainer.n_gpus_per_node=8 \\
  actor_rollout_ref.model.path=Qwen/Qwen3-8B-Base data.max_prompt_length=1024 data.max_response_length=1024 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.n=2 \\
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \\
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
"""
    read = run(verl, devices=None)
    facts = {fact.name: fact.value for fact in read.stated}
    assert (facts["layers"], facts["hidden size"], facts["ffn hidden size"]) == ("36", "4096", "12288")
    assert (read.layout.tp, read.layout.dp, read.workload.batch, read.workload.seq) == (2, 4, 128, 2048)
    assert "as it was published" in read.assumed[0].text


TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 4096
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""


def test_torchtitan_with_fsdp_over_replicas() -> None:
    read = run(TITAN, "run.toml", 32)
    x = read.layout
    assert (x.tp, x.dp, x.replicas, x.micro_batch, x.sequence_parallel) == (2, 16, 2, 2, True)
    assert x.shard is Shard.WEIGHTS and read.workload.batch == 32
    assert run(TITAN.replace("local_", "global_batch_size = 64\nlocal_"), "run.toml", 32).workload.batch == 64
    whole = TITAN.replace("shard_degree = -1", "shard_degree = 1").replace(
        "replicate_degree = 2", "replicate_degree = 16"
    )
    assert run(whole, "run.toml", 32).layout.shard is Shard.NONE


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"full"', '"selective"', r"run\.toml:12: activation checkpointing `selective`"),
        ('"8B"', '"debugmodel"', r"run\.toml:3: the sizes of torchtitan's llama3 debugmodel are not known"),
        ("tensor_parallel_degree = 2", "tensor_parallel_degree = 3", "not a multiple of tp × pp × cp = 3"),
        ("local_batch_size = 2", "", "does not state training.local_batch_size"),
    ],
)
def test_torchtitan_files_that_are_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(TITAN.replace(old, new), "run.toml", 32)


def test_a_flag_of_a_framework_is_known() -> None:
    read = run(f"torchrun pretrain_gpt.py {MODEL} {BATCH} --bf16 --use-turbo-attention --norm-init-weight 0.02")
    assert any("Primus-Turbo" in str(note) for note in read.notes)
