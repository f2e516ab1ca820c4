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
    (tmp_path / "template.json").write_text('{"zero_optimization": {"stage": ZERO_STAGE}, "x": SIZE}')
    text = f"""ZERO=1
sed "s/ZERO_STAGE/$ZERO/" template.json | sed "s/SIZE/4/" > ds.json
deepspeed --num_gpus 8 pretrain_gpt.py {MODEL} {BATCH} --fp16 --deepspeed --deepspeed_config ds.json
"""
    path = str(tmp_path / "run.sh")
    assert run(text, path, None).layout.shard is Shard.OPTIMIZER
    assert run(text.replace("ZERO=1", "ZERO=0"), path, None).layout.shard is Shard.NONE
    with pytest.raises(UserError, match="ZeRO stage"):
        run(text.replace("template.json", "gone.json"), path)


def test_runs_without_sizes_or_sequence_are_refused_by_name() -> None:
    verl = "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
    with pytest.raises(UserError, match=r"run\.sh:1: verl trains org/m, of which the file has no sizes"):
        run(verl + "actor_rollout_ref.model.path=org/m")
    slime = f"python train.py {MODEL} --rollout-batch-size 32 --tensor-model-parallel-size 2"
    with pytest.raises(UserError, match="slime packs its sequences"):
        run(slime)
    with pytest.raises(UserError, match="torchtitan"):
        run('[model]\nflavor = "8B"\n[training]\nseq_len = 2048\n', "run.toml")


def test_a_flag_of_a_framework_is_known() -> None:
    read = run(f"torchrun pretrain_gpt.py {MODEL} {BATCH} --bf16 --use-turbo-attention --norm-init-weight 0.02")
    assert any("Primus-Turbo" in str(note) for note in read.notes)
