"""Names in exported files are data: no name of a model, cluster or file adds a line or runs a command."""

from __future__ import annotations

import ast
import os
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from megaloom.dsl.quoting import is_printable, printable, shell_word, shown_message
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan, plan_command
from megaloom.planner.contract.workload import Runtime
from megaloom.planner.export.export import export_plan
from megaloom.planner.export.quoting import job_name
from megaloom.planner.export.target import TORCHTITANS, Target
from tests.support.exported import case, plan_with
from tests.support.limits import LIMIT

COMMAND = (
    "x\ntouch PWNED\n#",
    "x; touch PWNED",
    "x\rtouch PWNED",
    "$(touch PWNED)",
    "`touch PWNED`",
    "x'\n'; touch PWNED",
)
SEPARATORS = ("a b", "it's", 'say "x"', "x\u2028touch PWNED", "x\x85touch PWNED", "x\\", ": [1", "#", "\x1b[31m")
NAMES = (*COMMAND, *SEPARATORS, "--output=/tmp/x", "%x_%j")
COMMANDS = ("torchrun", "srun", "scontrol", "head", "touch")


def exported(target: Target, name: str) -> str:
    """Return an export of a plan whose model, cluster file and path have this name."""
    plan, model = case("gpt2")
    if target in TORCHTITANS:
        plan, model = case("llama3-8b")
        shape = Layout(dp=8, shard="weights", vocab_multiple=1)
        plan = plan_with(model, shape, gpus="8xH100", seq=8192)
    runtime = Runtime.MEGATRON if target is Target.MEGATRON_LM else Runtime.MEGALOOM
    plan = evolve(plan, cluster=evolve(plan.cluster, source=name), runtime=runtime)
    return export_plan(plan, evolve(model, name=name), target, f"{name}.json")


def ran(script: str, folder: Path) -> list[list[str]]:
    """Run a script in bash where each command only writes down its words. Return them; nothing else may be found."""
    for command in COMMANDS:
        stub = folder / command
        stub.write_text(f'#!/bin/bash\nprintf "%s\\0" {command} "$@" > {folder}/call-$$\n')  # a file for each process
        stub.chmod(0o755)
    for earlier in folder.glob("call-*"):
        earlier.unlink()
    (folder / "script.sh").write_text(script)
    checked = subprocess.run(
        ["/bin/bash", "-n", "script.sh"], cwd=folder, capture_output=True, text=True, timeout=LIMIT
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    environment = {
        "PATH": str(folder),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "n",
        "SLURM_CPUS_ON_NODE": "8",
        "RANK": "0",
    }
    done = subprocess.run(
        ["/bin/bash", "script.sh"], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert (done.returncode, done.stderr) == (0, ""), script
    return sorted(call.read_bytes().decode().split("\0")[:-1] for call in folder.glob("call-*"))


@pytest.mark.parametrize("target", Target)
def test_no_name_changes_what_an_export_does(target: Target, tmp_path: Path) -> None:
    """With any name, the export has as many lines, values and commands as with a harmless one."""
    harmless = exported(target, "x")
    for number, name in enumerate(NAMES):
        text = exported(target, name)
        assert len(text.splitlines()) == len(harmless.splitlines()), name
        if target in (Target.SLURM, Target.MEGATRON_LM):
            (folder := tmp_path / str(number)).mkdir()
            calls, usual = ran(text, folder), ran(harmless, folder)
            shown = [[word.replace(f"{name}.json", "x.json") for word in call] for call in calls]
            assert shown == usual
        elif target in (Target.MEGATRON_BRIDGE, Target.TORCHTITAN_0_3):
            assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(harmless))
        elif target is Target.TORCHTITAN:
            assert tomllib.loads(text) == tomllib.loads(harmless)
        else:
            parts, usual_parts = yaml.safe_load(text), yaml.safe_load(harmless)
            for part in (parts, usual_parts):
                for key in ("name", "run", "metadata", "spec"):
                    part.pop(key, None)
            assert parts == usual_parts


@pytest.mark.parametrize("target", [Target.KUBERNETES, Target.SKYPILOT])
def test_the_command_inside_of_a_job_has_the_name_as_one_word(target: Target, tmp_path: Path) -> None:
    for number, name in enumerate(NAMES):
        job = yaml.safe_load(exported(target, name))
        if target is Target.SKYPILOT:
            script = job["run"]
        else:
            (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
            assert "$(" not in container["command"][-1].replace("$$(", "")  # Kubernetes replaces $(NAME)
            script = container["command"][-1].replace("$$(", "$(")
        (folder := tmp_path / str(number)).mkdir()
        (call,) = [call for call in ran(script, folder) if call[0] != "head"]
        assert call[0] == "torchrun"
        assert call[call.index("train") + 1] == f"{name}.json"


def test_slurm_reads_no_name_as_an_option(tmp_path: Path) -> None:
    usual = [line for line in exported(Target.SLURM, "x").splitlines() if line.startswith("#SBATCH")]
    for name in NAMES:
        lines = [line for line in exported(Target.SLURM, name).splitlines() if "SBATCH" in line]
        assert [line.partition("=")[0] for line in lines] == [line.partition("=")[0] for line in usual]
        assert all(len(line.split()) == 2 for line in lines)


@given(st.text(st.characters(exclude_characters="\0"), min_size=1))
def test_a_printable_text_is_one_line(text: str) -> None:
    assert is_printable(shown := printable(text))
    assert len(shown.splitlines()) == 1
    assert is_printable(text) == (shown == text)
    assert len(shell_word(text).splitlines()) == 1
    assert "\n" not in job_name(text)


def test_a_word_of_a_command_is_read_back_by_bash() -> None:
    for name in (*NAMES, "\udcff\udc80 x", "tab\there", "é\u200bö"):
        script = f"printf %s {shell_word(name)}"
        done = subprocess.run(["/bin/bash", "-c", script], capture_output=True, timeout=LIMIT, check=True)
        assert done.stdout == os.fsencode(name)


def test_the_command_that_plans_again_runs_nothing_else() -> None:
    plan: Plan = case("gpt2")[0]
    for name in NAMES:
        command = plan_command(evolve(plan, model=name, cluster=evolve(plan.cluster, source=name)))
        script = f'plan() {{ printf "%s\\0" "$@"; }}; {command}'
        done = subprocess.run(["/bin/bash", "-c", script], capture_output=True, timeout=LIMIT, check=True)
        words = done.stdout.decode().split("\0")[:-1]
        assert words[:3] == [name, "--gpus", f"8x{name}"]


def test_a_message_is_cut_and_changes_no_terminal() -> None:
    message = shown_message(f"no model {'x' * 10**6}\x1b[31m\nand {'y ' * 10**6}\ntab\there")
    assert len(message) < 3_000
    assert is_printable(message.replace("\n", "").replace("\t", ""))
    assert message.count("\n") == 2 and message.endswith("tab\there")
