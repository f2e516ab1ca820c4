"""Damaged run files: what is misspelled, half a number, stated twice or cut off is refused by name, or said."""

from __future__ import annotations

import pytest

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.read import read_text
from megaloom.planner.runs.run import TrainingRun
from tests.support.run_files import FOLDER, inputs_of

pytest.importorskip("yaml")


def run(name: str, old: str, new: str) -> TrainingRun:
    """Return the run of a file in which one text stands for another."""
    text = (FOLDER / name).read_text()
    assert old in text
    return read_text(text.replace(old, new, 1), name, inputs_of(name))


REFUSED = [
    # sizes
    ("flags.txt", "--num-layers 4", "--num-layers 0", "--num-layers must be a whole number from 1"),
    ("flags.txt", "--num-layers 4", "--num-layers -4", "--num-layers must be a whole number from 1"),
    ("flags.txt", "--global-batch-size 16", "--global-batch-size 0", "must be a whole number from 1"),
    ("flags.txt", "--context-parallel-size 2", "--context-parallel-size 0", "must be a whole number from 1"),
    ("dense.sh", "--attention-dropout 0", "--attention-dropout nan", "must be a number from 0"),
    ("dense.sh", "--hidden-dropout 0", "--hidden-dropout -0.5", "must be a number from 0"),
    ("log.log", "num_attention_heads ............................. 4", "num_attention_heads ... 0", "from 1"),
    ("flags.txt", "--max-position-embeddings 512", "--max-position-embeddings 51", "fewer than the 512 tokens"),
    # numbers of machines
    ("experts.slurm", "--nodes=2", "--nodes=2x", r"the number --nodes must be a whole number from 1, got 2x\ngive"),
    ("experts.slurm", "--nodes=2", "--nodes=²", "the number --nodes must be a whole number"),
    ("slime.sh", "--actor-num-nodes 1", "--actor-num-nodes x", "--actor-num-nodes must be a whole number from 1"),
    ("slime.sh", "--n-samples-per-prompt 8", "--n-samples-per-prompt $N", "depends on variable N"),
    # names
    ("bridge.yaml", "hidden_size", "hidden_siz", "--hidden-siz is not a known flag"),
    ("bridge.yaml", "global_batch_size", "global_batchsize", "--train.global_batchsize is not a known flag"),
    ("bridge.yaml", "mixed_precision", "mixed_precison", "--mixed_precison is not a known flag"),
    ("bridge.yaml", "hidden_size", "hidden-size", "--settings.hidden-size is not a known flag"),
    ("recipe.py", "ddp=ddp", "dpp=ddp", "ConfigContainer has no field dpp"),
    ("nemo1.yaml", "overlap_grad_sync", "overlap_grad_synch", "overlap_grad_synch is not a known flag"),
    ("nemo1.yaml", "distributed_fused_adam", "distributed_lion", "--optimizer: only Adam is modelled"),
    ("nemo_rl.yaml", "tensor_model_parallel_size", "tensor_parallel_degree", "--tensor-parallel-degree is not a known"),
    ("nemo_rl.yaml", "train_global_batch_size", "train_global_batchsize", "is not a known flag"),
    ("primus.yaml", "add_bias_linear", "add_bias_liner", "add_bias_liner is not a known flag"),
    ("flagscale.yaml", "  data:", "  dataa:", "--dataa is not a known flag"),
    ("accelerate.yaml", "lm_pp_degree", "lm_ppdegree", "megatron_lm_ppdegree is not a known flag"),
    ("slime.sh", "--swiglu", "--swigluu", "--swigluu is not a known flag"),
    ("slime.sh", "--n-samples-per-prompt", "--n-sample-per-prompt", "--n-sample-per-prompt is not a known flag"),
    ("verl.sh", "ppo_mini_batch_size", "ppo_minibatch_size", "ppo_minibatch_size is not a known flag"),
    ("titan.toml", "seq_len", "seqlen", "the option training.seqlen of torchtitan is not known"),
    ("titan.toml", "[parallelism]", "[paralelism]", "the option paralelism.data_parallel_shard_degree"),
    ("titan.toml", 'mode = "full"', 'mode = "full"\nseq_len = 4', "the option activation_checkpoint.seq_len"),
    ("titan.py", "parallelism=", "paralellism=", "the section paralellism of torchtitan is not known"),
    # values
    ("nemo1.yaml", "overlap_grad_sync: true", "overlap_grad_sync: treu", "a switch must be true or false, got treu"),
    ("nemo_rl.yaml", "checkpointing: true", "checkpointing: ${X}", "a switch depends on variable X"),
    ("bridge.yaml", "use_distributed_optimizer: true", "use_distributed_optimizer: ture", "a switch must be true"),
    ("primus.yaml", "num_layers: 4", "num_layers: 010", "YAML takes this number as one of base 2, 8, 16 or 60"),
    ("titan.toml", "seq_len = 8192", 'seq_len = "8k"', "training.seq_len must be a whole number from 1, got 8k"),
    ("titan.toml", "size = 64", 'size = "64x"', "training.global_batch_size must be a whole number from 1, or -1"),
    ("titan.toml", "tensor_parallel_degree = 4", "tensor_parallel_degree = 0", "must be a whole number from 1, got 0"),
    ("titan.toml", "degree = -1", "degree = 4", "4 shards of 1 replicas are not the 2 data-parallel ranks of 8 GPUs"),
    ("swift.sh", "--tuner_type full", "--tuner_type full lora", "--tuner_type has one value, got 2"),
    # twice
    ("nemo1.yaml", "  num_layers: 8\n", "  num_layers: 8\n  num_layers: 9\n", "the key num_layers stands here again"),
    ("bridge.py", "num_layers=8,", "num_layers=8, num_layers=9,", "this line is not Python"),
    ("titan.py", "seq_len=4096", "seq_len=4096, seq_len=8192", "this line is not Python"),
    ("log.log", "  world_size", "  num_layers ... 8\n  world_size", "the argument num_layers is listed here again"),
    # lost parts
    ("dense.sh", "$TP \\\n", "$TP\n", "a command begins with an option, at which bash fails"),
    ("verl.sh", "nnodes=1 \\\n", "nnodes=1\n", "a command begins with an option, at which bash fails"),
    ("log.log", "-------------------- end of arguments ---------------------", "", "ends within its list of arguments"),
    ("bridge.py", "seq_length=1024,", "seq_length=1024, **more,", "arguments of a dict are not read here"),
]


@pytest.mark.parametrize(("name", "old", "new", "message"), REFUSED)
def test_what_is_damaged_is_refused_by_name(name: str, old: str, new: str, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("[", r"\[").replace("(", r"\(")):
        run(name, old, new)


SAID = [
    ("flags.txt", "--bf16\n", "--bf16\n--seq-length 256\n", "--seq-length stands with 512 (line 4) and 256 (line 10)"),
    (
        "dense.sh",
        " --hidden-dropout 0\n",
        " \\\n",
        "the last line ends with a backslash: flags may have stood on a line",
    ),
    (
        "experts.slurm",
        "#SBATCH --nodes",
        "#SBATCH --nodes=1\n#SBATCH --nodes",
        "#SBATCH --nodes stands again: its last",
    ),
    ("swift.sh", "--max_length 8192", "--max_length 8192 --max_length 4096", "max_length stands again"),
    ("verl.sh", "nnodes=1", "nnodes=1 data.max_prompt_length=512", "data.max_prompt_length stands again"),
    ("slime.sh", "--n-samples-per-prompt 8", "--n-samples-per-prompt 8 --n-samples-per-prompt 4", "stands again"),
    ("dense.sh", "--nproc_per_node $GPUS", "--nproc_per_nod $GPUS", "torchrun's option --nproc_per_nod is not known"),
    ("dense.sh", "--nproc_per_node $GPUS", "--nproc_per_node $NONE", "the number --nproc-per-node depends on variable"),
    (
        "dense.sh",
        "--nproc_per_node $GPUS",
        "--nnodes 2x --nproc_per_node 8",
        "the number --nnodes must be a whole number",
    ),
    ("experts.slurm", "--ntasks-per-node", "--ntask-per-node", "sbatch's option --ntask-per-node is not known"),
    ("dense.sh", "NullTokenizer", "NulTokenizer", "of a tokenizer that is not known"),
    ("log.log", "size ...................................... 8", "size ...... 16", "though the log lists 16"),
    ("log.log", "  bf16", "  bf61", "the log does not list bf16"),
    (
        "log.log",
        "  world_size",
        "  own_kernel .... fast\n  world_size",
        "1 listed arguments are not known, and left out: own",
    ),
    (
        "log.log",
        "  world_size",
        "  own-kernel .... fast\n  world_size",
        "1 lines of the list of arguments are not understood",
    ),
    ("verl.sh", "nnodes=1", "nnodes=1 actor_rollout_ref.actor.use_dynamic_bsz=true", "--pack-sequences is not in the"),
]


@pytest.mark.parametrize(("name", "old", "new", "sentence"), SAID)
def test_what_is_accepted_is_said(name: str, old: str, new: str, sentence: str) -> None:
    read = run(name, old, new)
    assert any(sentence in note.text for note in (*read.assumed, *read.notes)), [n.text for n in read.assumed]


@pytest.mark.parametrize("name", ["dense.sh", "flags.txt", "bridge.py", "titan.toml", "log.log", "primus.yaml"])
def test_line_ends_of_windows_and_a_byte_order_mark_change_nothing(name: str) -> None:
    plain = run(name, "", "")
    text = "\ufeff" + (FOLDER / name).read_text().replace("\n", "\r\n")
    read = read_text(text, name, inputs_of(name))
    assert (read.layout, read.workload, read.stated) == (plain.layout, plain.workload, plain.stated)
    assert any("end as on Windows" in note.text for note in read.assumed) is (name == "dense.sh")


def test_fields_that_a_script_of_bridge_changes_later_count() -> None:
    text = (FOLDER / "bridge.py").read_text().replace("return ConfigContainer(", "made = ConfigContainer(")
    text = text.replace("seq_length=1024,", "seq_length=1024, vocab_size=32000,")
    text = f"{text.rstrip()}\n    made.model.tensor_model_parallel_size = 4\n    return made\n"
    assert read_text(text, "bridge.py", inputs_of("bridge.py")).layout.tp == 4


def test_what_a_loop_over_unknown_values_sets_is_not_known() -> None:
    text = (FOLDER / "recipe.py").read_text()
    loop = "    for size in os.listdir():\n        provider.tensor_model_parallel_size = size\n    ddp ="
    with pytest.raises(UserError, match="--tensor-model-parallel-size depends on"):
        read_text(text.replace("    ddp =", loop), "recipe.py", inputs_of("recipe.py"))


def test_settings_of_verl_that_are_on_by_default() -> None:
    read = run("verl.sh", "nnodes=1", "nnodes=1")
    assert read.layout.sequence_parallel and read.layout.shard.value == 1
    off = run("verl.sh", "nnodes=1", "nnodes=1 actor_rollout_ref.actor.megatron.use_distributed_optimizer=false")
    assert off.layout.shard.value == 0


def test_a_list_of_layers_without_quotes_is_no_pattern_of_files() -> None:
    read = run("experts.slurm", "--moe-grouped-gemm", "--moe-layer-freq [0]+[1]*7 --moe-grouped-gemm")
    assert {fact.name: fact.value for fact in read.stated}["experts"] == "8 in 7 of 8 layers"
