"""Small settings files of our own read right: each has what a public file of the blind trial was misread for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.choices import GradReduce, Recompute, Shard
from megaloom.planner.runs.read import RunInputs, read_file, read_text
from megaloom.planner.runs.run import TrainingRun
from tests.support.run_files import FOLDER

pytest.importorskip("yaml")

SWIFT = """NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --max_length 4096 --global_batch_size 64 \\
  --expert_model_parallel_size 8"""
NEMO_RL = """
policy:
  model_name: Qwen/Qwen3-30B-A3B
  precision: bfloat16
  train_global_batch_size: 64
  train_micro_batch_size: 1
  max_total_sequence_length: 2048
  megatron_cfg:
    enabled: true
    expert_model_parallel_size: 8
    defer_fp32_logits: true
    distributed_data_parallel_config: {grad_reduce_in_fp32: false}
    optimizer: {use_distributed_optimizer: true}
cluster: {num_nodes: 1, gpus_per_node: 8}
"""
RECIPE = """
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import ConfigContainer, TokenizerConfig, TrainingConfig

TOKENS: int = 32000

def make(tp: int = 1, *, precision: str = "bf16_mixed") -> ConfigContainer:
    cfg = ConfigContainer(
        model=AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").get_model_config(),
        train=TrainingConfig(global_batch_size=32, micro_batch_size=1),
        tokenizer=TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", use_tokenizer_vocab_size=True),
        mixed_precision=precision,
    )
    cfg.tokenizer.tokenizer_type = "NullTokenizer"
    cfg.tokenizer.vocab_size = TOKENS
    cfg.model.tensor_model_parallel_size = tp
    cfg.model.seq_length = 2048
    return cfg

def mine() -> ConfigContainer:
    return make(CALL)
"""


def read(text: str, path: str = "run.sh", **given: object) -> TrainingRun:
    """Return the run of a text."""
    return read_text(text, path, RunInputs(**given))  # type: ignore[arg-type]


def left_out(run: TrainingRun) -> str:
    """Return the sentences about what a prediction leaves out, as one text."""
    return "\n".join(note.text for note in run.notes)


def recipe(call: str, *old_and_new: str) -> TrainingRun:
    """Return the run of a recipe that calls another function with these arguments."""
    text = RECIPE.replace("CALL", call)
    return read(text.replace(*old_and_new) if old_and_new else text, "mine.py", devices=8, command="mine")


def test_an_option_of_swift_that_switches_a_default_off_counts() -> None:
    assert read(SWIFT).layout.recompute is Recompute.SELECTIVE
    off = read(f"{SWIFT} --recompute_granularity none --use_distributed_optimizer false --apply_rope_fusion true")
    assert (off.layout.recompute, off.layout.shard) == (Recompute.NONE, Shard.NONE)
    assert "rope" in left_out(read(SWIFT)) and "rope" not in left_out(off)
    with pytest.raises(UserError, match="--torch_dtype other than bfloat16 is not modelled"):
        read(f"{SWIFT} --torch_dtype float16")


def test_gradients_of_nemo_rl_are_as_wide_as_its_file_says() -> None:
    assert read(NEMO_RL, "run.yaml").layout.grad_reduce is GradReduce.BF16
    wide = read(NEMO_RL.replace("in_fp32: false", "in_fp32: true"), "run.yaml")
    assert wide.layout.grad_reduce is GradReduce.FP32


@pytest.mark.parametrize(
    ("cluster", "resources", "data", "count"),
    [
        ("4, gpus_per_node: 8", "{num_nodes: 2, gpus_per_node: 8}", "{}", 16),
        ("1, gpus_per_node: 8", "{num_nodes: null, gpus_per_node: 2}", "{}", 6),
        ("4, gpus_per_node: 8", "{num_nodes: 1}", "{train: {env_name: reward_model}}", 16),
        ("4, gpus_per_node: 8", "{num_nodes: null}", "{}", None),
    ],
)
def test_gpus_that_generate_do_not_train(cluster: str, resources: str, data: str, count: int | None) -> None:
    apart = f"  generation: {{colocated: {{enabled: false, resources: {resources}}}}}\n"
    text = NEMO_RL.replace("cluster: {num_nodes: 1, gpus_per_node: 8}", "") + apart
    text += f"cluster: {{num_nodes: {cluster}}}\ndata: {data}\nenv: {{reward_model: {{resources: {{num_nodes: 1}}}}}}\n"
    if count is not None:
        assert read(text, "run.yaml").devices.count == count
        assert read(text.replace("enabled: false", "enabled: true"), "run.yaml").devices.count in (8, 24, 32)
        return
    with pytest.raises(UserError, match=r"depends on variable policy\.generation\.colocated\.resources"):
        read(text, "run.yaml")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("  hf_config_overrides: {rope_scaling: {factor: 4}}", r"--policy\.hf_config_overrides is not a known flag"),
        ("  quant_cfg: NVFP4", r"--policy\.quant_cfg is not a known flag"),
        ("  draft: {enabled: true, num_layers: 1}", r"--policy\.draft is not a known flag"),
        ("  some_new_thing: 3", r"--policy\.some_new_thing is not a known flag"),
        ("rm: {max_num_epochs: 1}", "--rm is not a known flag"),
    ],
)
def test_keys_of_nemo_rl_that_may_change_the_model_are_refused(line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(NEMO_RL.replace("cluster:", f"{line}\ncluster:"), "run.yaml")
    unset = "  hf_config_overrides: {}\n  quant_cfg: null\n  draft: {enabled: false, num_layers: 1}\ncluster:"
    assert read(NEMO_RL.replace("cluster:", unset), "run.yaml").devices.count == 8


def test_a_model_of_values_is_named() -> None:
    both = f"{NEMO_RL}ppo: {{ppo_epochs: 1}}\nvalue: {{model_name: Qwen/Qwen3-8B}}\n"
    assert "the prediction is for the policy" in left_out(read(both, "run.yaml"))


def test_experts_of_a_model_that_is_named_run_as_the_framework_sets_them() -> None:
    notes = left_out(read(NEMO_RL, "run.yaml"))
    assert "one by one" not in notes and "allgather" not in notes
    assert "logits stay in 16 bits" in notes


def test_the_vocabulary_of_a_recipe_is_that_of_its_tokenizer() -> None:
    vocabulary = {fact.name: fact.value for fact in recipe("2").stated}["vocabulary"]
    assert vocabulary == "32001"  # and the end of a document
    own = recipe("2", '    cfg.tokenizer.tokenizer_type = "NullTokenizer"\n', "")
    assert {fact.name: fact.value for fact in own.stated}["vocabulary"] == "128256"
    assert "the vocabulary is that of the tokenizer" in left_out(own)


def test_a_recipe_of_fp8_names_the_layers_that_stay_in_bf16() -> None:
    assert "some layers stay in bf16" in left_out(recipe('precision="bf16_with_fp8_current_scaling_mixed"'))
    assert "some layers stay in bf16" not in left_out(recipe('precision="bf16_with_fp8_delayed_scaling_mixed"'))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("2, mock=True, seq=3", r"mine\.py:21: make takes no argument mock and 1 more, so Python stops here"),
        ("2, 4", r"mine\.py:21: make takes 1 arguments, and is called with 2, so Python stops here"),
        ("**kwargs", "the value of --tensor-model-parallel-size depends on condition"),
    ],
)
def test_an_argument_that_a_function_does_not_take_is_never_left_out(call: str, message: str) -> None:
    assert recipe("tp=2").layout.tp == 2
    with pytest.raises(UserError, match=message):
        recipe(call)


NEMO = """
trainer: {devices: 8, precision: bf16}
model:
  tensor_model_parallel_size: 1
  micro_batch_size: 1
  global_batch_size: 8
  encoder_seq_length: 512
  max_position_embeddings: 512
  num_layers: 2
  hidden_size: 256
  num_attention_heads: 4
  position_embedding_type: rope
  activation: fast-swiglu
  tokenizer: {type: GPT2BPETokenizer}
  data: {reset_position_ids: false, reset_attention_mask: true}
"""


def nemo(*lines: str) -> TrainingRun:
    """Return the run of a file of NeMo with more lines in its model."""
    return read(NEMO.replace("  tokenizer:", "".join(f"  {line}\n" for line in lines) + "  tokenizer:"), "run.yaml")


def test_documents_of_nemo_are_named() -> None:
    assert "documents do not attend to each other" in left_out(nemo()) and "positions restart" not in left_out(nemo())


def test_settings_of_nemo_that_were_refused_or_left_out() -> None:
    run = nemo("rotary_base: 1000000.0", "precision: 32", "cpu_offloading_num_layers: 3", "dist_ckpt_new: 1")
    assert run.workload.precision == "bf16"
    assert "the activation takes more kernels" in left_out(nemo("bias_activation_fusion: false"))
    assert nemo("fp8: true", "fp8_params: true").profile != nemo("fp8: true").profile
    experts = ("num_moe_experts: 4", "moe_router_topk: 2", "ffn_hidden_size: 512")
    assert "one by one" in left_out(nemo(*experts))
    assert "one by one" not in left_out(nemo(*experts, "moe_grouped_gemm: true"))
    with pytest.raises(UserError, match="--rotary-base must be a whole number"):
        nemo("rotary_base: 1000000.5")
    with pytest.raises(UserError, match="--cpu-offloading is not a known flag"):
        nemo("cpu_offloading: true")


def test_an_optimizer_of_nemo_that_a_parent_names_is_asked_for() -> None:
    assert (
        nemo("optim: {name: distributed_fused_adam, lr: 0.1}", "answer_only_loss: true").layout.shard is Shard.OPTIMIZER
    )
    with pytest.raises(UserError, match=r"model\.optim has no name here.*\n.*model\.optim\.name="):
        nemo("optim: {lr: 0.1}")


def test_sections_of_nemo_that_are_not_read_are_refused() -> None:
    assert nemo(
        "peft: {peft_scheme: none, lora_tuning: {dim: 8}}", "inference: {greedy: true}", "other: {a: null, b: False}"
    )
    with pytest.raises(UserError, match="adapters of NeMo are not modelled"):
        nemo("peft: {peft_scheme: lora}")
    with pytest.raises(UserError, match=r"--model\.quantization is not a known flag"):
        nemo("quantization: {algorithm: fp8}")


def test_values_that_a_file_decodes() -> None:
    hidden = "hidden_size: ${oc.decode:${oc.env:WIDTH,${multiply:128,${model.num_layers}}}}"
    text = NEMO.replace("hidden_size: 256", hidden)
    facts = {fact.name: fact.value for fact in read(text, "run.yaml").stated}
    assert facts["hidden size"] == "256"
    wide = read(text, "run.yaml", environment={"WIDTH": "512"})
    assert {fact.name: fact.value for fact in wide.stated}["hidden size"] == "512"
    with pytest.raises(UserError, match="the value of --hidden-size depends on variable WIDTH"):
        read(NEMO.replace("hidden_size: 256", "hidden_size: ${oc.decode:${oc.env:WIDTH}}"), "run.yaml")


def test_parents_that_a_command_line_chooses_and_those_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "plain.yaml").write_text("name: fused_adam\n")
    (tmp_path / "optim" / "shared.yaml").write_text("name: distributed_fused_adam\n")
    text = f"defaults:\n  - optim@model.optim: plain\n  - _self_\n{NEMO}"
    (tmp_path / "run.yaml").write_text(text)
    path = str(tmp_path / "run.yaml")
    assert read_file(path, RunInputs()).layout.shard is Shard.NONE
    chosen = RunInputs(positional=("optim@model.optim=shared", "model.micro_batch_size=2"))
    run = read_file(path, chosen)
    assert (run.layout.shard, run.layout.micro_batch) == (Shard.OPTIMIZER, 2)
    with pytest.raises(UserError, match=r"the parent file .*optim/gone is not there, and what it sets is not known"):
        read_file(path, RunInputs(positional=("optim@model.optim=gone",)))


def test_files_that_state_no_model_are_named() -> None:
    bridge = "model: {tensor_model_parallel_size: 2}\ntrain: {global_batch_size: 64}\n"
    with pytest.raises(UserError, match=r"run\.yaml states no model: it changes a recipe of Megatron-Bridge\nread"):
        read(bridge, "run.yaml", devices=8)
    with pytest.raises(UserError, match=r"is a file of GPT-NeoX"):
        read("pipe-parallel-size: 1\nzero_optimization: {stage: 1}\n", "run.yaml")


def test_visible_devices_of_flagscale() -> None:
    text = """
experiment: {runner: {hostfile: null}, envs: {CUDA_VISIBLE_DEVICES: "0,1,2,3"}}
train:
  system: {tensor_model_parallel_size: 2, precision: {bf16: true}}
  model: {num_layers: 2, hidden_size: 256, num_attention_heads: 4, seq_length: 128, max_position_embeddings: 128,
    micro_batch_size: 1, global_batch_size: 8}
  data: {tokenizer: {tokenizer_type: NullTokenizer, vocab_size: 1000}}
"""
    assert read(text, "run.yaml").devices.count == 4
    with pytest.raises(UserError, match=r"depends on file experiment\.runner\.hostfile"):
        read(text.replace("hostfile: null", "hostfile: hosts.txt"), "run.yaml")
    assert read(text.replace("hostfile: null", "nproc_per_node: 2"), "run.yaml").devices.count == 2
    with pytest.raises(UserError, match=r"depends on file experiment\.runner\.hostfile"):  # it starts one machine
        read(text.replace("hostfile: null", "nnodes: 4"), "run.yaml")


def test_flagscale_passes_names_of_flags_and_primus_destinations() -> None:
    """FlagScale makes a flag of each key, the groups one over another; Primus sets destinations alone."""
    flagscale = """
train:
  system: {tensor_model_parallel_size: 2, micro_batch_size: 4, batch: {global_batch_size: 16}}
  model: {num_layers: 2, hidden_size: 256, num_attention_heads: 4, seq_length: 128, max_position_embeddings: 128,
    add_bias_linear: false, micro_batch_size: 1, batch: {vocab_size: 1000}, swiglu: false}
  data: {tokenizer_type: NullTokenizer}
"""
    run = read(flagscale, "run.yaml", devices=8)
    assert (run.layout.micro_batch, run.workload.batch) == (1, 4)
    assert next(fact.value for fact in run.stated if fact.name == "biases") == "yes"
    with pytest.raises(UserError, match=r"run\.yaml:5: --settings\.swiglu is not a known flag"):
        read(flagscale.replace("swiglu: false", "swiglu: [[1]]"), "run.yaml", devices=8)
    primus = """
modules:
  pre_trainer:
    framework: megatron
    overrides: {num_layers: 2, hidden_size: 256, num_attention_heads: 4, seq_length: 128, max_position_embeddings: 128,
      vocab_size: 1000, tokenizer_type: NullTokenizer, micro_batch_size: 1, disable_bias_linear: false}
"""
    assert read(primus, "run.yaml", devices=8).layout.dp == 8
    for strange in ("disable_bias_linear: true", "lora: {rank: 8}", "fp8_format: hybrid"):
        with pytest.raises(UserError, match=rf"--overrides\.{strange.partition(':')[0]} is not a known flag"):
            read(primus.replace("disable_bias_linear: false", strange), "run.yaml", devices=8)


def test_names_of_torchtitan_before_2025() -> None:
    text = """
[model]
name = "llama3"
flavor = "8B"
[training]
batch_size = 2
seq_len = 2048
tensor_parallel_degree = 4
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
enable_loss_parallel = true
[experimental]
pipeline_parallel_degree = 1
[activation_checkpoint]
mode = "full"
[float8]
enable_float8_linear = true
"""
    run = read(text, "run.toml", devices=32)
    x = run.layout
    assert (x.tp, x.dp, x.replicas, x.micro_batch, run.workload.precision) == (4, 8, 2, 2, "fp8")


GROUP = """
system: {tensor_model_parallel_size: 2, precision: {fp16: true}, no_shared_fs: "${experiment.saves}"}
model: {num_layers: 2, hidden_size: 256, num_attention_heads: 4, seq_length: 128, max_position_embeddings: 128,
  ffn_hidden_size: 1024, multiple_of: 256, micro_batch_size: 1, global_batch_size: 8}
data: {tokenizer: {tokenizer_type: NullTokenizer, vocab_size: 1000}}
"""
EXPERIMENT = """
defaults: [_self_, {train: large}]
experiment:
  task: {type: train, backend: megatron, entrypoint: flagscale/train/train_gpt.py}
  runner: {nproc_per_node: 4}
  saves: false
"""


def test_a_group_of_flagscale_is_read_with_the_experiment_beside_it(tmp_path: Path) -> None:
    """The experiment has the program, the GPUs, and what the group refers to; it chooses another file of the group."""
    (tmp_path / "train").mkdir()
    group, experiment = tmp_path / "train" / "small.yaml", tmp_path / "train.yaml"
    group.write_text(GROUP)
    with pytest.raises(UserError, match=r"flags depend on variable experiment\.saves"):
        read_file(str(group), RunInputs(devices=8))
    experiment.write_text(EXPERIMENT)
    (tmp_path / "train_other.yaml").write_text(EXPERIMENT.replace("4", "2"))
    run = read_file(str(group), RunInputs())
    assert (run.devices.count, run.layout.tp, run.workload.batch) == (4, 2, 8)
    assert any("train.yaml, which stands beside the file" in note.text for note in run.assumed)
    assert any(fact.name == "gradients" for fact in run.stated)  # as wide as fp16 weights
    experiment.write_text(EXPERIMENT.replace("train_gpt", "train_rwkv"))
    with pytest.raises(UserError, match=r"train\.yaml:4: FlagScale trains with flagscale/train/train_rwkv\.py"):
        read_file(str(group), RunInputs())
    experiment.write_text(EXPERIMENT)
    group.write_text(GROUP.replace("ffn_hidden_size: 1024, ", ""))
    with pytest.raises(UserError, match="--multiple-of: the width of the MLP that it gives is not read"):
        read_file(str(group), RunInputs())


def test_the_class_of_activation_checkpointing_until_2026() -> None:
    text = (FOLDER / "titan.py").read_text()
    older = re.sub(r"activation_checkpoint=[^\n]*,\n", "activation_checkpoint=AC,\n", text)
    assert older != text
    read_older = read(older.replace("=AC", '=ActivationCheckpointConfig(mode="full")'), "titan.py", devices=8)
    assert read_older.layout.recompute is Recompute.FULL
    with pytest.raises(UserError, match="activation checkpointing `selective` of torchtitan keeps other"):
        read(older.replace("=AC", "=ActivationCheckpointConfig()"), "titan.py", devices=8)


def test_switches_of_verl_that_are_off_change_nothing() -> None:
    text = (FOLDER / "verl.sh").read_text().rstrip()
    actor = "actor_rollout_ref.actor"
    off = f"{actor}.megatron.router_replay.mode=disabled"
    off += f" +{actor}.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d=True"
    assert read(f"{text} {off}\n", "verl.sh").layout == read(text, "verl.sh").layout
    with pytest.raises(UserError, match=r"router_replay\.mode is not a known flag"):
        read(f"{text} {actor}.megatron.router_replay.mode=R3\n", "verl.sh")


def test_a_sourced_file_at_the_path_of_another_machine(tmp_path: Path) -> None:
    """Its end is looked for above the script; the value of a flag of slime that changes nothing is not asked for."""
    text = (FOLDER / "slime.sh").read_text()
    first, _, rest = text.partition("\n")
    (tmp_path / "scripts" / "models").mkdir(parents=True)
    (tmp_path / "examples").mkdir()
    (tmp_path / "scripts" / "models" / "small.sh").write_text(f"{first}\n")
    script = tmp_path / "examples" / "run.sh"
    script.write_text(f"source /root/slime/scripts/models/small.sh\n{rest.rstrip()} --wandb-key ${{KEY}}\n")
    run = read_file(str(script), RunInputs())
    assert run.layout == read(text, "slime.sh").layout
    assert any("small.sh, read from" in note.text for note in run.assumed)


def test_gradients_of_deepspeed_without_zero_are_as_wide_as_fp16_weights() -> None:
    text = """deepspeed --num_nodes 1 --num_gpus 8 pretrain_gpt.py --num-layers 4 --hidden-size 256 --seq-length 256 \\
  --num-attention-heads 8 --max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 8 --vocab-size 1000 \\
  --fp16 --deepspeed --zero-stage 0"""
    features = {stage: read(text.replace("stage 0", f"stage {stage}")).profile.optimizer for stage in (0, 1)}
    assert features[0].gradient_nbytes == features[1].gradient_nbytes == 2
    assert any(fact.name == "gradients" for fact in read(text).stated)
