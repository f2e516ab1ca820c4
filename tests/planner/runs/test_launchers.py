"""Commands of programs around Megatron-LM: slime, ms-swift, Primus; and published models that they name."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.dsl.facts.parameters import params
from megaloom.planner.contract.choices import Shard
from megaloom.planner.runs.read import RunInputs, read_text
from megaloom.planner.runs.run import TrainingRun
from megaloom.planner.runs.settings.published import published_model
from megaloom.planner.runs.words import Origin, Word

MODEL = "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --vocab-size 1000"
SLIME = f"""ray job submit --address=x -- python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 \\
  {MODEL} --rollout-batch-size 32 --n-samples-per-prompt 8 --num-steps-per-rollout 2 --sglang-mem-fraction-static 0.7 \\
  --tensor-model-parallel-size 2 --context-parallel-size 2 --use-dynamic-batch-size --max-tokens-per-gpu 8192 \\
  --hf-checkpoint /root/secret-model"""
SWIFT = """NNODES=2 NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B-Base --dataset a b c --packing true \\
  --pipeline_model_parallel_size 2 --expert_model_parallel_size 8 --global_batch_size 64 --max_length 8192 \\
  --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 --tuner_type full"""
PRIMUS = """
modules:
  pre_trainer:
    framework: megatron
    overrides:
      num_layers: 4
      hidden_size: 256
      num_attention_heads: 8
      seq_length: 512
      max_position_embeddings: 512
      vocab_size: 1000
      tokenizer_type: NullTokenizer
      micro_batch_size: 1
      global_batch_size: 64
      tensor_model_parallel_size: ${TP:4}
      bf16: true
"""


def run(text: str, path: str = "run.sh", devices: int | None = None, *flags: str) -> TrainingRun:
    """Return the run of a text; flags are those of `--set`."""
    added = tuple(Word(f"--{flag}", Origin("--set", 1)) for flag in flags)
    return read_text(text, path, RunInputs(devices=devices, flags=added))


def test_slime_asks_for_the_sequence_and_packs_micro_batches() -> None:
    with pytest.raises(UserError, match=r"states no sequence length\ngive .*: --set seq-length=4096"):
        run(SLIME)
    read = run(SLIME, "run.sh", None, "seq-length=2048")
    assert (read.devices.count, read.layout.tp, read.layout.cp, read.layout.dp) == (16, 2, 2, 4)
    assert (read.workload.seq, read.workload.batch, read.layout.micro_batch) == (2048, 128, 8)
    assert read.layout.shard is Shard.OPTIMIZER
    assert any("slime's flags" in note.text for note in read.assumed)


def test_a_command_of_swift_has_its_defaults_and_published_sizes() -> None:
    pytest.importorskip("yaml")
    read = run(SWIFT)
    x = read.layout
    assert (x.pp, x.ep, x.etp, x.dp, x.micro_batch, x.shard) == (2, 8, 1, 8, 1, Shard.OPTIMIZER)
    assert (read.workload.seq, read.workload.batch) == (8192, 64)
    assert params(read.model) == params(find("qwen3-30b-a3b")[0])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("--tuner_type full", "--tuner_type lora", "--tuner_type other than full is not modelled"),
        (
            "Qwen/Qwen3-30B-A3B-Base",
            "deepseek-ai/DeepSeek-V4-Flash",
            "trains deepseek-ai/DeepSeek-V4-Flash: its hyper-conn",
        ),
        (
            "Qwen/Qwen3-30B-A3B-Base",
            "Qwen/Qwen3.5-27B",
            r"trains Qwen/Qwen3\.5-27B: linear attention \(gated delta nets",
        ),
        ("Qwen/Qwen3-30B-A3B-Base", "zai-org/GLM-5.2", r"GLM-5\.2: attention to the tokens that an indexer chooses"),
        ("Qwen/Qwen3-30B-A3B-Base", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "BF16: layers of Mamba among those"),
        ("Qwen/Qwen3-30B-A3B-Base", "openai/gpt-oss-20b", "20b: its windows in every other layer have no flags"),
        ("megatron sft", "megatron rlhf", "megatron rlhf learns from preferences or rewards, which is not read"),
        ("Qwen/Qwen3-30B-A3B-Base", "org/private", "ms-swift trains org/private, of which the sizes are not known"),
        ("--packing true", "--new_option 3", "--new-option is not a known flag"),
        ("--max_length 8192", "", "--seq-length is not stated"),
    ],
)
def test_what_is_not_known_of_swift_is_refused_by_name(old: str, new: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(SWIFT.replace(old, new))


def test_a_command_of_primus_is_its_file_with_the_options(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "run.yaml").write_text(PRIMUS)
    script = str(tmp_path / "scripts" / "run.sh")
    cli = "./primus-cli direct -- train pretrain --config run.yaml --micro_batch_size 4"
    read = run(f"export NNODES=1 GPUS_PER_NODE=8 TP=2\n{cli}", script)
    assert (read.layout.tp, read.layout.micro_batch, read.devices.count) == (2, 4, 8)
    variable = "export EXP=run.yaml\nbash run_pretrain.sh --micro_batch_size 2 --seq_length 256"
    read = run(variable, script, 8)
    assert (read.layout.tp, read.layout.micro_batch, read.workload.seq) == (4, 2, 256)
    with pytest.raises(UserError, match=r"the settings file gone\.yaml is not there"):
        run(variable.replace("run.yaml", "gone.yaml"), script, 8)


def test_options_on_the_command_line_change_a_file_of_primus() -> None:
    pytest.importorskip("yaml")
    read = read_text(PRIMUS, "run.yaml", RunInputs(devices=8, positional=("micro_batch_size=8",)))
    assert read.layout.micro_batch == 8


@pytest.mark.parametrize(
    ("name", "example"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3-1-8b"),
        ("meta-llama/Meta-Llama-3-70B", "llama3-70b"),
        ("Llama-3.3-70B-Instruct", "llama3-1-70b"),
        ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
        ("/models/Qwen3-30B-A3B-Instruct-2507/", "qwen3-30b-a3b"),
        ("zai-org/GLM-4.5-Air", "glm4-5-air"),
        ("zai-org/GLM-4.5-Base", "glm4-5"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2-5-7b"),
        ("Qwen/Qwen2-7B", "qwen2-5-7b"),
        ("meta-llama/Llama-3.2-3B", "llama3-3b"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("moonshotai/Moonlight-16B-A3B-Instruct", "moonlight-16b-a3b"),
        ("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2"),
    ],
)
def test_a_published_model_is_the_example_with_all_its_parameters(name: str, example: str) -> None:
    model = published_model(name)
    assert model is not None
    flags = shlex.join(word.text for word in model.words(Word(name, Origin("run.sh", 1))))
    rest = "--seq-length 1024 --micro-batch-size 1 --global-batch-size 8 --bf16 --tokenizer-type NullTokenizer"
    read = run(f"torchrun --nproc_per_node 8 pretrain_gpt.py {flags} {rest} --make-vocab-size-divisible-by 1")
    added = 1  # NullTokenizer has one token more
    embed = 2 if "--untie" in flags else 1
    wide = int(flags.split("--hidden-size ")[1].split()[0])
    assert params(read.model) == params(find(example)[0]) + added * embed * wide


@pytest.mark.parametrize("name", ["org/qwen3-9b", "gpt2", "llama3", "", "/"])
def test_other_names_are_no_published_model(name: str) -> None:
    assert published_model(name) is None


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--xielu", "this activation, which has weights of its own, is not read"),
        ("--moe-num-experts 64", "experts of MegaBlocks are not modelled"),
        ("--activations-checkpoint-method uniform", "use --recompute-granularity and --recompute-method"),
    ],
)
def test_flags_of_forks_that_matter_are_refused_with_the_reason(flag: str, message: str) -> None:
    rest = "--seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 8 --bf16"
    text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {MODEL} {rest} --tokenizer-type NullTokenizer"
    harmless = f"{text} --use-mpi --wandb-name x --use-z-loss --goldfish-loss --goldfish-k 50"
    assert [note.text for note in run(harmless).notes if "the loss" in note.text]
    with pytest.raises(UserError, match=message):
        run(f"{text} {flag}")
