"""The evaluator names what a script does not say, and knows what an unknown condition does not change."""

import os
import subprocess
from pathlib import Path

import pytest

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.shell import read_script, script_of_text
from megaloom.planner.runs.words import Script, Unknown, Word


def script(text: str, *positional: str, **environment: str) -> Script:
    """Return the script of a text."""
    return script_of_text(text, "run.sh", environment, positional)


def texts(words: tuple[Word, ...]) -> list[str]:
    """Return the texts of words; an unknown one is `?`."""
    return ["?" if w.unknown else w.text for w in words]


def names(unknown: tuple[Unknown, ...]) -> list[tuple[str, str]]:
    """Return kind and name of unknowns."""
    return [(u.kind, u.name) for u in unknown]


def test_a_variable_is_asked_for_by_name_and_can_be_given() -> None:
    text = "train --tp $TP --pp ${PP:-4}"
    (command,) = script(text).commands
    assert texts(command.words) == ["train", "--tp", "?", "--pp", "4"]
    assert names(command.unknown) == [("variable", "TP")]
    assert names(script(text).assumed) == [("variable", "PP")]
    (command,) = script(text, TP="8", PP="2").commands
    assert texts(command.words) == ["train", "--tp", "8", "--pp", "2"] and not command.unknown


def test_a_word_has_the_line_where_its_text_stands() -> None:
    text = 'TP=8\nARGS=(\n  --tp $TP\n  --pp 2\n)\nX="--a 1\n--b 2"\ntrain ${ARGS[@]} $X\n'
    (command,) = script(text).commands
    assert [(w.text, w.origin.line_number) for w in command.words] == [
        ("train", 8), ("--tp", 3), ("8", 1), ("--pp", 4), ("2", 4), ("--a", 6), ("1", 6), ("--b", 7), ("2", 7),
    ]  # fmt: skip


def test_only_what_branches_do_not_agree_on_is_unknown() -> None:
    text = """
if [ "$SIZE" = 7b ]; then H=4096; L=32; TP=2
elif [ "$SIZE" = 8b ]; then H=4096; L=36; TP=2
else echo "no such size"; exit 1
fi
train --hidden $H --layers $L --tp $TP
"""
    (command,) = script(text).commands
    assert texts(command.words) == ["train", "--hidden", "4096", "--layers", "?", "--tp", "2"]
    assert names(command.unknown) == [("variable", "SIZE")]
    assert [[w.text for w in words] for words in command.words[4].either] == [["32"], ["36"]]
    assert texts(script(text, SIZE="8b").commands[0].words)[4] == "36"


def test_an_array_that_may_have_more_items_names_them() -> None:
    text = 'A=(--x 1)\nif [ -f old/state ]; then A+=(--load old); fi\ntrain "${A[@]}" --y 2'
    (command,) = script(text).commands
    assert texts(command.words) == ["train", "--x", "1", "?", "--y", "2"]
    assert names(command.unknown) == [("file", "old/state")]
    assert sorted([w.text for w in words] for words in command.words[3].either) == [[], ["--load", "old"]]


def test_positional_arguments() -> None:
    text = 'if [ $# -lt 2 ]; then echo usage; exit 1; fi\nTP=$1; shift\ntrain --tp $TP "$@"'
    assert names(script(text).commands[0].unknown) == [("positional", "1")]
    assert texts(script(text, "8", "--pp", "2").commands[0].words) == ["train", "--tp", "8", "--pp", "2"]
    assert not script(text, "8").commands


def test_output_of_other_programs_is_unknown() -> None:
    text = "N=$(nvidia-smi -L | wc -l)\nM=$(date +%s)\ntrain --n $N --m $M --k $(( N * 2 ))"
    command = script(text).commands[-1]
    assert texts(command.words) == ["train", "--n", "?", "--m", "?", "--k", "?"]
    assert names(command.unknown) == [("command", "nvidia-smi"), ("command", "date")]


def test_slurm_options_set_variables() -> None:
    text = """#!/bin/bash
#SBATCH -N 4
#SBATCH --gres=gpu:h100:8   # all
#SBATCH --ntasks-per-node=1
srun --nodes $SLURM_NNODES bash -c "torchrun --nnodes $SLURM_NNODES --nproc-per-node $SLURM_GPUS_ON_NODE \\
  --node_rank \\$SLURM_NODEID train.py"
#SBATCH --nodes=16
"""
    result = script(text)
    assert {name: word.text for name, word in result.sbatch.items()} == {
        "nodes": "4", "gres": "gpu:h100:8", "ntasks-per-node": "1",
    }  # fmt: skip
    (command,) = result.commands
    assert " ".join(texts(command.words)) == (
        "srun --nodes 4 torchrun --nnodes 4 --nproc-per-node 8 --node_rank ? train.py"
    )
    assert command.words[3].text == "torchrun" and command.words[2].origin.line_number == 2


def test_other_scripts_are_followed(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("TP=4\nexport SEQ=4096\n")
    (tmp_path / "inner.sh").write_text('train --tp ${TP:-1} --seq $SEQ --x "$1"\n')
    (tmp_path / "run.sh").write_text(
        'DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\nsource $DIR/env.sh\nbash inner.sh $TP\nsource gone.sh\n'
    )
    result = read_script(tmp_path / "run.sh", {})
    (command,) = result.commands
    assert texts(command.words) == ["train", "--tp", "1", "--seq", "4096", "--x", "4"]
    assert command.words[4].origin.path.endswith("env.sh") and command.environment["SEQ"].text == "4096"
    assert names(result.unknown) == [("file", "gone.sh")]


def test_files_from_here_documents_are_kept() -> None:
    text = """ZERO=1
cat > ds.json <<EOF
{"stage": $ZERO}
EOF
cat <<EOF > lost.json
{"stage": $STAGE}
EOF
train --ds ds.json"""
    assert script(text).files == {"ds.json": '{"stage": 1}\n'}


def test_a_loop_gives_a_command_for_each_round() -> None:
    commands = script("for pp in 1 2; do train --pp $pp & done; wait").commands
    assert [texts(c.words)[-1] for c in commands] == ["1", "2"]
    (command,) = script("for n in $(hostname -I); do ssh $n 'cd /x; train --tp 4'; done").commands[1:]
    assert texts(command.words) == ["ssh", "?", "train", "--tp", "4"]


def test_a_condition_that_is_not_known_is_with_its_commands() -> None:
    commands = script('if [ "$MODE" = a ]; then train --a; else train --b; fi; train --c').commands
    assert [names(c.unknown) for c in commands] == [[("condition", "MODE")], [("condition", "MODE")], []]


def test_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a program was started")

    for module, name in ((subprocess, "Popen"), (os, "system"), (os, "execve"), (os, "fork"), (os, "posix_spawn")):
        monkeypatch.setattr(module, name, refuse)
    kept = tmp_path / "kept"
    kept.write_text("here")
    text = (
        f"rm -rf {kept}\necho over > {kept}\nX=$(rm {kept}; touch {tmp_path}/new)\n`rm {kept}`\neval 'rm {kept}'\ntrain"
    )
    assert [c.words[0].text for c in script(text).commands][-1] == "train"
    assert kept.read_text() == "here" and sorted(p.name for p in tmp_path.iterdir()) == ["kept"]


@pytest.mark.parametrize(
    "line", ["if true; then TOKEN=secret", "X='secret", "done secret", "coproc secret", "echo ${secret"]
)
def test_lines_that_are_not_understood_are_not_shown(line: str) -> None:
    with pytest.raises(UserError, match=r"^run\.sh:\d+: this line is shell syntax") as error:
        script(f"A=1\n{line}\n")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("text", ["for ((;;)); do X=a$X; done; train", "while :; do X=a$X; done; train"])
def test_loops_without_an_end_are_left(text: str) -> None:
    assert texts(script(text).commands[-1].words) == ["train"]


@pytest.mark.parametrize("text", ["f() { f; }; f", "(" * 1500, "X=$(" * 3000, "f() { eval f; }; f"])
def test_endless_recursion_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"^run\.sh"):
        script(text)


@pytest.mark.parametrize(
    "text",
    [
        "X=<Specify path>\ntrain $X",
        "X=<PATH_OF_MODEL> (e.g., /357m)\ntrain $X",
        "X=/data/<your corpus>_text\ntrain $X",
        'CMD="cd <path/to/repo> && train --data=<PATH (see above)> \\\n "\neval $CMD',
    ],
)
def test_a_placeholder_is_unknown_and_never_a_redirection(text: str) -> None:
    (command,) = script(text).commands
    assert names(command.unknown) in ([("placeholder", "<…>")], [("placeholder", "<…>")] * 2)


def test_redirections_beside_brackets_stay_redirections() -> None:
    (command,) = script("train --a <in >out --b").commands
    assert texts(command.words) == ["train", "--a", "--b"] and not command.unknown


def test_a_job_that_submits_itself_again_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text('[ "$AGAIN" = yes ] && sbatch --dependency=singleton $0\nsrun train x\n')
    words = [texts(command.words) for command in read_script(path, {}).commands]
    assert words == [["sbatch", "--dependency=singleton", str(path)], ["srun", "train", "x"]]


def test_scripts_that_start_each_other_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text("bash $0\n")
    with pytest.raises(UserError, match="scripts start each other more than 30 times"):
        read_script(path, {})


def test_commands_whose_output_another_reads_as_a_file_are_evaluated() -> None:
    text = "mapfile -t HOSTS < <(scontrol show hostnames)\ntrain --machines ${#HOSTS[@]} --host ${HOSTS[0]}"
    commands = script(text).commands
    assert [texts(c.words)[0] for c in commands] == ["scontrol", "train"]
    assert texts(commands[1].words) == ["train", "--machines", "?", "--host", "?"]


@pytest.mark.parametrize("test", ['[ -z "${BASE:-}" ]', '[ "${BASE:-}" = "" ]', "[[ -z ${BASE-} ]]"])
def test_a_script_that_ends_without_a_variable_is_not_run_without_it(test: str) -> None:
    use = 'train ${BASE:-x} $((BASE + 1)) "$BASE" $BASE'
    read = script(f"BASE=${{BASE:-}}\nif {test}; then echo no; exit 1; fi\n{use}")
    (command,) = read.commands
    assert texts(command.words) == ["train", "x", "1", ""]
    assert ("variable", "BASE") in names(read.assumed)


def test_arithmetic_of_lists_names_no_files() -> None:
    (command,) = script("train --freq [0]*3+[1]*58 --data /data/*.bin").commands
    assert texts(command.words) == ["train", "--freq", "[0]*3+[1]*58", "--data", "?"]


def test_paths_are_resolved_without_looking_at_the_disk() -> None:
    (command,) = script("cd /a/b; train $(realpath ../c) $(readlink -f d) $(readlink d)").commands[-1:]
    assert texts(command.words) == ["train", "/a/c", "/a/b/d", "?"]
