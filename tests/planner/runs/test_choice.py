"""Choice of the training command, and what is said of scripts without one."""

from pathlib import Path

import pytest

from megaloom.dsl.errors import UserError
from megaloom.planner.cli.main import main
from megaloom.planner.runs.read import RunInputs, read_text
from megaloom.planner.runs.run import TrainingRun

MODEL = "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512"
BATCH = "--micro-batch-size 1 --global-batch-size 64 --vocab-size 1000 --tokenizer-type NullTokenizer --bf16"
TRAIN = f"torchrun --nproc_per_node 8 pretrain_gpt.py {MODEL} {BATCH}"
SWEEP = f"for TP in 1 2 4; do {TRAIN} --tensor-model-parallel-size $TP; done"


def run(text: str, command: str | None = None, environment: dict[str, str] | None = None) -> TrainingRun:
    """Return the run of a text."""
    return read_text(text, "run.sh", RunInputs(command=command, environment=environment or {}))


def refusal(text: str, command: str | None = None) -> str:
    """Return the message with which a text is refused."""
    with pytest.raises(UserError) as caught:
        run(text, command)
    return str(caught.value)


def test_several_training_commands_are_listed_by_what_tells_them_apart() -> None:
    listed = [f"  {n}: line 1, pretrain_gpt.py --tensor-model-parallel-size {2 ** (n - 1)}" for n in (1, 2, 3)]
    several = ["run.sh starts 3 training commands", "give the one to read: --command 1"]
    assert refusal(SWEEP).splitlines() == [*several, *listed]
    assert refusal(SWEEP, "4").splitlines() == ["--command must be from 1 to 3, got '4'", *listed]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_command_of_a_number_is_read(number: int) -> None:
    read = run(SWEEP, str(number))
    assert read.layout.tp == 2 ** (number - 1)
    assert f"training command {number} of 3 (`--command`)" in [note.text for note in read.assumed]


def test_a_list_shows_no_words_but_numbers_of_known_flags() -> None:
    text = f"{TRAIN} --wandb-project s3cret --seq-length 256\n{TRAIN} --wandb-project other"
    assert "s3cret" not in refusal(text) and "--seq-length 256" in refusal(text)


def test_the_same_command_on_each_machine_is_one() -> None:
    text = (
        f"for R in 0 1; do ssh host$R torchrun --node_rank $R --nproc_per_node 8 pretrain_gpt.py {MODEL} {BATCH}; done"
    )
    assert not [note for note in run(text).assumed if "training command" in note.text]


def test_programs_that_train_no_gpt_are_left_out_where_one_does() -> None:
    text = f"python tools/checkpoint/convert.py {MODEL}\n{TRAIN}"
    assert run(text).layout.dp == 8


def test_the_variable_that_decides_whether_a_training_starts_is_asked_for() -> None:
    text = f'CMD="{TRAIN}"\nif [ "$PROFILER" = nsys ]; then CMD="nsys profile $CMD -o x"; fi\n$CMD'
    assert "not known: variable PROFILER\ngive --env PROFILER=…" in refusal(text)
    assert run(text, environment={"PROFILER": ""}).layout.dp == 8


def test_a_file_of_variables_is_told_from_a_script() -> None:
    text = f"MODEL_ARGS=({MODEL})\n"
    assert refusal(text).endswith("\nit only sets MODEL_ARGS: give the script that sources it")


def test_flags_with_underscores_are_those_with_dashes() -> None:
    words = [f"--{w[2:].replace('-', '_')}" if w.startswith("--") else w for w in f"{MODEL} {BATCH}".split()]
    read = run(f"torchrun --nproc_per_node 8 finetune.py {' '.join(words)}")
    assert (read.layout, read.workload) == (run(TRAIN).layout, run(TRAIN).workload)
    assert any("underscores" in note.text for note in read.assumed)


def test_the_option_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(SWEEP)
    assert main(["--from", str(tmp_path / "run.sh"), "--gpus", "H100", "--command", "2"]) == 0
    assert "tp 2" in capsys.readouterr().out
    assert main(["llama3-8b", "--command", "2"]) == 2
    assert "--command has no effect without --from" in capsys.readouterr().err


def test_arguments_of_the_script_are_asked_for_by_their_places() -> None:
    text = f"{TRAIN} --tensor-model-parallel-size $2 --pipeline-model-parallel-size ${{10}}"
    assert refusal(text).endswith("after all options, as in `-- FIRST SECOND`; it needs 2, 10")


def test_several_commands_of_which_none_trains_a_gpt_are_refused_by_the_first() -> None:
    text = "\n".join(f"python tasks/main.py {MODEL} --task {task}" for task in ("LAMBADA", "WIKITEXT103"))
    assert refusal(text).endswith("main.py trains a classifier, or evaluates; only training of GPT is read")
