"""Settings files of each format as Megatron-LM's flags, with their lines, parents and interpolations."""

from pathlib import Path

import pytest

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.settings import SettingsRun, settings_command, settings_text
from megaloom.planner.runs.shell import script_of_text
from megaloom.planner.runs.words import Origin, Word

pytest.importorskip("yaml")


def flags(run: SettingsRun) -> dict[str, str]:
    """Return the value of each flag; `?NAME` for one that is not known, and nothing for a switch."""
    result: dict[str, str] = {}
    for word in run.words:
        if word.text.startswith("--"):
            name = word.text.removeprefix("--")
            result[name] = ""
        else:
            shown = f"?{word.unknown[0].name}" if word.unknown else word.text
            result[name] = f"{result[name]} {shown}".strip()
    return result


def line(run: SettingsRun, flag: str) -> int:
    """Return the line of a flag's value."""
    at = next(n for n, w in enumerate(run.words) if w.text == f"--{flag}")
    return run.words[at + 1].origin.line_number


NEMO = """
trainer:
  num_nodes: 4
  devices: 8
  precision: bf16-mixed
model:
  micro_batch_size: 2
  global_batch_size: 256
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: null
  encoder_seq_length: 4096
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: ${multiply:4, ${.hidden_size}}
  num_attention_heads: 32
  num_query_groups: 8
  normalization: rmsnorm
  bias: false
  activation: fast-swiglu
  share_embeddings_and_output_weights: false
  fp8: false
  fp8_hybrid: true
  seed: ${training.model.micro_batch_size}
  optim:
    name: mcore_distributed_optim
    overlap_grad_sync: true
  tokenizer: {library: megatron, type: GPT2BPETokenizer, vocab_file: "${data_dir}/v.json"}
"""


def test_nemo() -> None:
    run = settings_text(NEMO, "run.yaml", {})
    assert run.framework == "NeMo 1" and run.nodes and run.per_node
    assert (run.nodes.text, run.per_node.text) == ("4", "8")
    expected = {
        "micro-batch-size": "2", "tensor-model-parallel-size": "4", "seq-length": "4096", "ffn-hidden-size": "16384",
        "num-query-groups": "8", "group-query-attention": "", "normalization": "RMSNorm", "disable-bias-linear": "",
        "swiglu": "", "untie-embeddings-and-output-weights": "", "bf16": "", "use-distributed-optimizer": "",
        "overlap-grad-reduce": "", "vocab-file": "?data_dir",
    }  # fmt: skip
    got = flags(run)
    assert {k: got.get(k) for k in expected} == expected
    assert not {"fp8-format", "num-virtual-stages-per-pipeline-rank", "seed"} & got.keys()
    assert line(run, "ffn-hidden-size") == 15 and line(run, "tensor-model-parallel-size") == 9


def test_a_key_of_nemo_that_is_not_known_becomes_a_flag_that_is_refused_by_name() -> None:
    run = settings_text(NEMO.replace("seed:", "wavelet_width:"), "run.yaml", {})
    assert flags(run)["wavelet-width"] == "2"


def test_flagscale_with_its_group(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "8b.yaml").write_text(
        "system:\n  tensor_model_parallel_size: 4\n  precision: {bf16: true, fp16: false}\n  seed: ${experiment.seed}\n"
        "model:\n  num_layers: 32\n  disable_bias_linear: true\n  optimizer: {lr_scheduler: {lr: 1e-5}}\n"
        "data: {data_path: '${data_path:??}'}\n"
    )
    text = "defaults:\n  - train: 8b\n  - _self_\nexperiment:\n  seed: 3\n"
    text += "  runner: {nnodes: 2, nproc_per_node: 8, hostfile: hosts}\n"
    text += "train: {model: {num_layers: 16}}\n"
    run = settings_text(text, str(tmp_path / "train.yaml"), {})
    assert flags(run) == {
        "tensor-model-parallel-size": "4", "bf16": "", "seed": "3", "num-layers": "16", "disable-bias-linear": "",
        "lr": "1e-5", "data-path": "?data_path",
    }  # fmt: skip
    layers = next(w for w in run.words if w.text == "16")
    assert layers.origin == Origin(str(tmp_path / "train.yaml"), 7)
    assert " ".join(w.text for w in run.script("train.yaml").commands[0].words[:6]) == (
        "torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py"
    )


def test_primus_with_its_parents(tmp_path: Path) -> None:
    models, modules = (tmp_path / "primus" / "configs" / f / "megatron" for f in ("models", "modules"))
    for folder in (models, modules):
        folder.mkdir(parents=True)
    (models / "base.yaml").write_text("add_bias_linear: false\nnum_layers: 24\nhidden_size: 1024\nturbo_width: 3\n")
    (models / "small.yaml").write_text("extends:\n  - base.yaml\nnum_layers: 80\n")
    (modules / "pre.yaml").write_text("bf16: true\nmasked_softmax_fusion: true\nhidden_size: 2048\nown_trace: 3\n")
    text = """
modules:
  pre_trainer:
    framework: megatron
    config: pre.yaml
    model: ${PRIMUS_MODEL:small}.yaml
    overrides:
      micro_batch_size: 3
      tensor_model_parallel_size: ${PRIMUS_TP:1}
      lr_decay_iters: null
      sequence_parallel: 1
      fp8: hybrid
      own_kernel: fast
"""
    path = str(tmp_path / "examples.yaml")
    run = settings_text(
        text, path, {"PRIMUS_TP": "8"}, is_flag=lambda flag: flag not in ("--turbo-width", "--own-trace")
    )
    assert flags(run) == {
        "bf16": "", "disable-bias-linear": "", "num-layers": "80", "hidden-size": "2048", "micro-batch-size": "3",
        "turbo-width": "3",
        "tensor-model-parallel-size": "8", "sequence-parallel": "", "fp8-format": "hybrid", "own-kernel": "fast",
    }  # fmt: skip
    assert [u.name for u in run.assumed] == ["PRIMUS_MODEL"] and not run.unknown
    gone = settings_text(text, path, {"PRIMUS_MODEL": "large"})
    assert [(u.kind, u.name) for u in gone.unknown] == [("file", "primus/configs/models/megatron/large.yaml")]
    with pytest.raises(UserError, match="for torchtitan"):
        settings_text(text.replace("framework: megatron", "framework: torchtitan"), path, {})


def test_nemo_rl_reads_megatron_beside_vllm(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "policy:\n  precision: bfloat16\n  megatron_cfg: {enabled: false, context_parallel_size: 2}\n"
        "  generation: {vllm_cfg: {tensor_parallel_size: 8}}\ncluster: {num_nodes: 1, gpus_per_node: 8}\n"
    )
    text = """defaults: base.yaml
policy:
  model_name: org/model-70b
  train_global_batch_size: 512
  train_micro_batch_size: 1
  max_total_sequence_length: 4096
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 4, activation_checkpointing: true}
cluster: {num_nodes: 8}
"""
    run = settings_text(text, str(tmp_path / "run.yaml"), {})
    assert flags(run) == {
        "tensor-model-parallel-size": "4", "context-parallel-size": "2", "micro-batch-size": "1",
        "global-batch-size": "512", "seq-length": "4096", "bf16": "", "recompute-granularity": "full",
        "recompute-method": "uniform", "recompute-num-layers": "1",
    }  # fmt: skip
    assert run.model and run.model.text == "org/model-70b" and run.nodes and run.nodes.text == "8"
    with pytest.raises(UserError, match="DTensor"):
        settings_text((tmp_path / "base.yaml").read_text(), "base.yaml", {})


def test_verl_multiplies_its_mini_batch() -> None:
    text = """N=4
python3 -m verl.trainer.main_ppo data.max_prompt_length=1024 data.max_response_length=3072 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.rollout.n=$N \\
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \\
  actor_rollout_ref.rollout.tensor_model_parallel_size=32 \\
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
  +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \\
  actor_rollout_ref.model.path=org/m trainer.nnodes=2 trainer.n_gpus_per_node=8
"""
    (command,) = script_of_text(text, "run.sh", {}).commands
    run = settings_command(command, {})
    assert run and run.model and run.nodes
    assert flags(run) == {
        "tensor-model-parallel-size": "2", "recompute-granularity": "full", "micro-batch-size": "1",
        "global-batch-size": "512", "seq-length": "4096", "bf16": "", "sequence-parallel": "",
        "use-distributed-optimizer": "",
    }  # fmt: skip
    assert settings_command(script_of_text("train --num-layers 2", "run.sh", {}).commands[0], {}) is None


def test_bridge_overrides() -> None:
    text = "model: {tensor_model_parallel_size: 8, seq_length: 8192, num_moe_experts: 64}\n"
    text += "train: {global_batch_size: 128}\nddp: {overlap_grad_reduce: true}\nmixed_precision: bf16_mixed\n"
    over = [Word("model.tensor_model_parallel_size=4", Origin("--", 1))]
    assert flags(settings_text(text, "run.yaml", {}, over)) == {
        "tensor-model-parallel-size": "4", "seq-length": "8192", "num-experts": "64", "global-batch-size": "128",
        "overlap-grad-reduce": "", "bf16": "",
    }  # fmt: skip


def test_torchtitan_keys_are_its_options() -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n\n[training]\nseq_len = 8192\n[compile]\ncomponents = ["a", "b"]\n'
    run = settings_text(text, "run.toml", {})
    assert run.program == "torchtitan.train"
    assert flags(run)["training.seq_len"] == "8192" and flags(run)["compile.components"] == "a,b"
    assert line(run, "training.seq_len") == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zero_optimization: {stage: 1}", "is a file of DeepSpeed"),
        ("base_model: x", "is a file of Axolotl"),
        ("a: 1", "is YAML of a format that is not known"),
        ("- 1", "has no settings"),
        ("a: [secret", r"run\.yaml:1: this line is not YAML"),
        ("a: !!python/object:os.system secret", r"run\.yaml:1: a YAML tag that is not read"),
        ("a: 1\n---\nb: 2", "several YAML documents"),
        ("defaults:\n  - run\nb: 1", "the parents of this file have no end"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        settings_text(text, str(tmp_path / "run.yaml"), {})
    assert "secret" not in str(error.value)


def test_interpolation_that_is_not_simple_is_named() -> None:
    text = NEMO.replace("${multiply:4, ${.hidden_size}}", "${ceil_to:64,${.hidden_size}}")
    assert flags(settings_text(text, "run.yaml", {}))["ffn-hidden-size"] == "?${ceil_to:…}"
    text = NEMO.replace("micro_batch_size: 2", "micro_batch_size: ${oc.env:MBS,4}")
    assert flags(settings_text(text, "run.yaml", {}))["micro-batch-size"] == "4"
    assert flags(settings_text(text, "run.yaml", {"MBS": "8"}))["micro-batch-size"] == "8"
