"""Small scripts and logs of our own read right: each has what a public file of the blind trial was misread for."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import graph
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.runs.megatron.read import Hints
from megaloom.planner.runs.read import RunInputs, read_text
from megaloom.planner.runs.run import TrainingRun
from megaloom.planner.runs.words import Origin, Word

GPT = """--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 \\
  --micro-batch-size 1 --global-batch-size 64 --bf16"""
TOKENS = "--tokenizer-type NullTokenizer --vocab-size 1000"


def read(text: str, path: str = "run.sh", vocab: int | None = None, **given: object) -> TrainingRun:
    """Return the run of a text."""
    return read_text(text, path, RunInputs(hints=Hints(vocab=vocab), **given))  # type: ignore[arg-type]


def facts(run: TrainingRun) -> dict[str, str]:
    """Return the facts of a run by name."""
    return {fact.name: fact.value for fact in run.stated}


def said(run: TrainingRun) -> str:
    """Return what is assumed and what is left out, as one text."""
    return "\n".join(note.text for note in (*run.assumed, *run.notes))


@pytest.mark.parametrize(
    ("launcher", "count", "each"),
    [
        ("mpirun -np 16 --npernode 8 -x A=b -map-by slot", 16, 8),
        ("N=4; mpirun -n $((N * 4)) -N 4 --bind-to none", 16, 4),
        ("mpiexec -np 8 -x NNODES=2", 8, None),
        ("mpirun -np 2 -npernode 1 torchrun --nnodes 2 --nproc_per_node 8", 16, 8),
    ],
)
def test_processes_of_mpi(launcher: str, count: int, each: int | None) -> None:
    devices = read(f"{launcher} python pretrain_gpt.py {GPT} {TOKENS}").devices
    assert (devices.count, devices.per_machine) == (count, each)


def test_a_number_of_processes_that_is_not_known_is_asked_for() -> None:
    with pytest.raises(UserError, match="the number --np depends on variable HOSTS"):
        read(f"mpirun -np $HOSTS python pretrain_gpt.py {GPT} {TOKENS}")
    text = f"#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\nsrun torchrun --nproc_per_node $EACH pretrain_gpt.py {GPT}"
    with pytest.raises(UserError, match="the number --nproc-per-node depends on variable EACH"):
        read(f"{text} {TOKENS}")


def test_machines_of_a_job_of_pbs() -> None:
    text = "#!/bin/bash\n#PBS -l select=4:ncpus=8:ngpus=8\nmpirun -np $(wc -l <$PBS_NODEFILE) python pretrain_gpt.py"
    assert read(f"{text} {GPT} {TOKENS}").devices.count == 32
    with pytest.raises(UserError, match="the number --np depends on"):
        read(f"{text} {GPT} {TOKENS}".replace("=8\n", "=8+1:ngpus=4\n"))


def test_a_job_whose_script_stands_in_the_file() -> None:
    text = f"""TP=2
CMD="cd /opt/here; python /opt/here/pretrain_gpt.py {GPT} {TOKENS} --tensor-model-parallel-size $TP"
sbatch <<EOF
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
srun --mpi=pmix bash -c "$CMD"
EOF
"""
    run = read(text)
    assert (run.layout.tp, run.devices.count) == (2, 16)


def test_a_command_between_single_quotes_may_be_continued() -> None:
    text = f"launch -p 8 -c 'python /opt/main.py {GPT} \\\n {TOKENS}'"
    assert read(text, devices=8).workload.seq == 1024


def test_the_last_line_may_be_continued_and_an_exit_is_named() -> None:
    run = read(f"torchrun --nproc_per_node 8 pretrain_gpt.py {GPT} {TOKENS} \\\n")
    assert "the last line ends with a backslash" in said(run) and run.devices.count == 8
    with pytest.raises(UserError, match=r"the script stops at run\.sh:2: exit"):
        read(f'ARGS="{GPT} {TOKENS}"; exit 1\ntorchrun pretrain_gpt.py $ARGS')


def test_options_of_slurm_that_stand_again() -> None:
    text = f"#SBATCH --nodes=2\n#SBATCH -N 4\n#SBATCH --gpus-per-node=8\nsrun python pretrain_gpt.py {GPT} {TOKENS}"
    run = read(text)
    assert run.devices.count == 32 and "#SBATCH --nodes stands again: its last value counts" in said(run)


def test_sizes_of_a_checkpoint_count_more_than_those_of_the_file() -> None:
    torchrun = f"torchrun --nproc_per_node 8 pretrain_gpt.py {GPT} {TOKENS}"
    assert "--use-checkpoint-args takes the sizes of the model from the checkpoint" in said(
        read(f"{torchrun} --use-checkpoint-args")
    )
    assert "checkpoint" not in said(read(torchrun))


def test_names_of_older_releases_and_of_megatron_deepspeed() -> None:
    text = f"""deepspeed --num_gpus 8 pretrain_gpt.py {GPT} {TOKENS} --no-query-key-layer-scaling
  --normalization rmsnorm --num-key-value-heads 2 --use-flash-attn-v2 --layernorm-epsilon 1e-6
  --checkpoint-activations --deepspeed --zero-stage 0""".replace("\n", " ").replace("\\", "")
    run = read(text, devices=8)
    assert (facts(run)["norm"], facts(run)["key/value heads"]) == ("RMSNorm", "2")
    assert run.layout.recompute is Recompute.FULL


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--distribute-checkpointed-activations", "inputs of recomputed layers that tensor-parallel ranks share"),
        ("--moe-type mixtral", "experts of this fork are not modelled"),
        ("--qk-nope-head-dim 64", "--qk-head-dim stays 128"),
    ],
)
def test_flags_of_forks_are_refused_with_their_reason(flags: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        read(f"torchrun --nproc_per_node 8 pretrain_gpt.py {GPT} {TOKENS} {flags}")


def test_a_switch_of_one_fork_has_a_value_in_another() -> None:
    torchrun = f"torchrun --nproc_per_node 8 pretrain_gpt.py {GPT} {TOKENS}"
    assert "norms run a kernel of the fork" in said(read(f"{torchrun} --use-fused-rmsnorm"))
    assert "norms run a kernel of the fork" in said(read(f"{torchrun} --use-fused-rmsnorm 1 --optimizer adamw"))
    assert "norms run a kernel" not in said(read(f"{torchrun} --use-fused-rmsnorm 0"))


@pytest.mark.parametrize(
    ("files", "vocab"),
    [
        ("--vocab-file $DATA/gpt2-vocab.json --merge-file $DATA/gpt2-merges.txt", "50257"),
        ("--vocab-file $VOCAB --merge-file $MERGES --tokenizer-type GPT2BPETokenizer", "50257"),
        ("--vocab-file nordic/vocab.json --merge-file nordic/merges.txt --tokenizer-type GPT2BPETokenizer", None),
        ("--vocab-file nordic/vocab.json --merge-file nordic/merges.txt", None),
    ],
)
def test_merges_are_those_of_gpt2_only_where_their_path_says_so(files: str, vocab: str | None) -> None:
    text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {GPT} {files}"
    if vocab is not None:
        assert facts(read(text))["vocabulary"] == vocab
        return
    with pytest.raises(UserError, match=r"the vocabulary.* is not stated"):
        read(text)
    assert facts(read(text, vocab=131072))["vocabulary"] == "131072"


def test_a_part_of_a_log_is_named_as_one() -> None:
    line = (
        "[default7]: iteration        1/  10 | consumed samples: 8 | elapsed time per iteration (ms): 5980.8 | lm loss"
    )
    with pytest.raises(UserError, match=r"x\.out begins with iterations: .*\ngive the log from its beginning"):
        read(f"\n{line}\n{line}\n", "x.out")


def test_what_a_program_around_bridge_trains_is_named() -> None:
    with pytest.raises(UserError, match=r"run\.sh:1: setup_experiment\.py trains a recipe of Megatron-Bridge\nread"):
        read("python scripts/performance/setup_experiment.py --model_recipe_name llama3_8b --gpu h100")


def test_micro_batches_that_verl_packs_are_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    text = """python3 -m verl.trainer.main_ppo data.max_prompt_length=1024 data.max_response_length=1024 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.use_dynamic_bsz=True \\
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
  trainer.nnodes=1 trainer.n_gpus_per_node=8"""
    with pytest.raises(UserError, match=r"packed up to a number of tokens.*\ngive .*--set micro-batch-size=4"):
        read(text)
    flags = (Word("--micro-batch-size", Origin("--set", 1)), Word("4", Origin("--set", 1)))
    assert read(text, flags=flags).layout.micro_batch == 4


def test_flags_of_slime_that_are_nearly_others_are_left_out() -> None:
    text = f"""python3 train.py {GPT} {TOKENS} --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-batch-size 8 \\
  --rm-type math --n-samples-per-eval-prompt 8"""
    assert read(text).devices.count == 8


def test_gpus_of_slime_that_a_program_counts_are_asked_for() -> None:
    text = f"""COUNT=${{COUNT:-$(nvidia-smi -L | wc -l)}}
python3 train.py {GPT} {TOKENS} --actor-num-nodes 1 --actor-num-gpus-per-node $COUNT --rollout-batch-size 8"""
    with pytest.raises(UserError, match=r"the number of GPUs that train depends on .*\n.*--gpus 8xH100"):
        read(text)
    assert read(text, devices=16).devices.count == 16
    assert read(text, environment={"COUNT": "4"}).devices.count == 4


@pytest.mark.parametrize(
    ("search", "layers"),
    [
        ("grep -q -- --deep", "8"),
        ("grep -qF -- --shallow", "4"),
        ("grep -q deep", "8"),
        ("grep -q dee.", None),
        ("grep -c deep", None),
    ],
)
def test_a_search_in_a_known_text_is_a_known_condition(search: str, layers: str | None) -> None:
    text = f"""ARGS="--deep --wide"
L=4
if echo "$ARGS" | {search}; then L=8; fi
torchrun --nproc_per_node 8 pretrain_gpt.py {GPT} {TOKENS} --num-layers $L"""
    if layers is not None:
        assert facts(read(text))["layers"] == layers
        return
    with pytest.raises(UserError, match="depends on command grep"):
        read(text)


def test_a_file_that_is_not_there_is_not_empty() -> None:
    text = f"""TOTAL=$(<sizes/total.txt)
if [ -z "$TOTAL" ]; then exit 1; fi
torchrun --nproc_per_node 8 pretrain_gpt.py {GPT} {TOKENS}"""
    assert facts(read(text))["layers"] == "4"
    with pytest.raises(UserError, match=r"depends on file sizes/total\.txt"):
        read(f"{text} --seed 1 --micro-batch-size $TOTAL")


def test_a_job_that_a_script_writes_and_submits_is_read() -> None:
    job = f"#!/bin/bash\n#SBATCH --nodes=2\nsrun torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py {GPT} {TOKENS}"
    assert read(f"cat > out/job.sbatch <<- EOM\n{job}\nEOM\nsbatch out/job.sbatch\n").devices.count == 16
    again = f"cat > out/job.sbatch <<- EOM\n{job}\nsbatch out/job.sbatch\nEOM\nsbatch out/job.sbatch\n"
    assert read(again).devices.count == 16


def test_names_of_megatron_deepspeed_that_were_not_known() -> None:
    text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {GPT} {TOKENS} --use-rotary-position-embeddings"
    run = read(f"{text} --rotary-position-embeddings-theta 20_000 --repeated-dataloader --mask_user_turn")
    assert any("rope=20000" in repr(node.op) for node in graph(run.model).nodes)


VERL = """python3 -m verl.trainer.main_ppo data.max_prompt_length=1024 data.max_response_length=1024 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \\
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
  trainer.nnodes=1 trainer.n_gpus_per_node=8 """


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("actor_rollout_ref.model.lora.rank=32", "adapters of verl are not modelled"),
        ("actor_rollout_ref.model.lora_rank=8", "adapters of verl are not modelled"),
        ("actor_rollout_ref.actor.strategy=fsdp", "the actor trains with fsdp, not with Megatron"),
        (
            "+actor_rollout_ref.model.override_config.model_config.depth=4",
            r"--override_config\.model_config\.depth is not",
        ),
        ("actor_rollout_ref.model.mtp.enable=True", r"--actor_rollout_ref\.model\.mtp\.enable is not a known flag"),
        ("actor_rollout_ref.actor.qat.enable=True", r"--actor_rollout_ref\.actor\.qat\.enable is not a known flag"),
        ("actor_rollout_ref.actor.own_thing=1", r"--actor_rollout_ref\.actor\.own_thing is not a known flag"),
        ("actor_rollout_ref.actor.optim.optimizer=sgd", "--optimizer: only Adam is modelled"),
        (
            "+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True",
            "--optimizer-cpu-offload: an optimizer on the host",
        ),
    ],
)
def test_settings_of_verl_that_change_the_model_or_its_optimizer_are_refused(setting: str, message: str) -> None:
    pytest.importorskip("yaml")
    with pytest.raises(UserError, match=message):
        read(VERL + setting)


def test_settings_of_verl_that_change_no_step() -> None:
    pytest.importorskip("yaml")
    plain = read(
        f"{VERL} actor_rollout_ref.model.lora_rank=0 actor_rollout_ref.actor.clip_ratio_high=0.3 "
        "+actor_rollout_ref.model.override_config.attn_implementation=eager actor_rollout_ref.model.mtp.enable=False"
    )
    assert plain.layout == read(VERL).layout and "value" not in said(plain)
    more = read(f"{VERL} actor_rollout_ref.model.use_fused_kernels=True algorithm.adv_estimator=gae")
    assert "a fused kernel of verl" in said(more) and "the prediction is for the policy" in said(more)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--train-backend fsdp", "only training by Megatron is read"),
        ("--only-train-params-name-list a b", "weights that are not trained are not modelled"),
        ("--use-stateless-adam", "an optimizer without moments is not modelled"),
        ("--custom-model-provider-path my.model", "a model that a program of its own builds is not read"),
        ("--lora-rank 8", "adapters are not modelled"),
    ],
)
def test_flags_of_slime_that_change_what_trains_are_refused(flags: str, message: str) -> None:
    text = f"python3 train.py {GPT} {TOKENS} --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-batch-size 8"
    assert read(f"{text} --train-backend megatron --lora-rank 0 --enable-mtp-training").devices.count == 8
    with pytest.raises(UserError, match=message):
        read(f"{text} {flags}")
