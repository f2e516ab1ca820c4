"""Messages of `plan` for wrong input, and its exit when it is interrupted or its reader ends."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megaloom.planner.contract.plan_json import load
from megaloom.planner.hardware.presets import PRESETS
from megaloom.planner.search.best_first import Frontier
from megaloom.planner.simulate.price import Priced
from tests.planner.cli.test_plan import run
from tests.support.limits import LIMIT


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "MODEL is missing"),
        (["gpt3"], "did you mean gpt2?"),
        (["missing.py:gpt"], "no file 'missing.py'"),
        (["gpt2", "--gpus", "8xH1000"], "did you mean H100?"),
        (["gpt2", "--gpus", "0xH100"], "give at least 1xH100"),
        (["gpt2", "--gpus", "12xH100"], "12xH100 is not a whole number of 8-GPU nodes\nuse 8 or 16, or"),
        (["gpt2", "--seq", "0"], "seq must be at least 1, got 0"),
        (["gpt2", "--batch", "0"], "batch must be at least 1, got 0"),
        (["gpt2", "--batch", "1000000000"], "1,048,576 or less"),
        (["gpt2", "--seq", 26 * "9"], "134,217,728 or less"),
        (["gpt2", "--tp", 26 * "9"], "1,048,576 or less"),
        (["gpt2", "--recompute", "full", "--recompute-layers", "-1"], "recompute-layers must be at least 0, got -1"),
        (["gpt2", "--batch", "64.5"], "--batch must be a whole number, got '64.5'"),
        (["gpt2", "--seq", "4096"], "longer than the 1024 learned positions"),
        (["gpt2", "--tp", "8"], "use --tp 4 instead of --tp 8"),
        (["gpt2", "--tp", "two"], "--tp must be a whole number, got 'two'"),
        (["gpt2", "--tp", "0"], "tp must be at least 1, got 0"),
        (["gpt2", "--dp", "8", "--batch", "12"], "use --batch 8 or 16"),
        (["gpt2", "--precision", "fp7"], 'Choose from: "fp32", "bf16", "fp16", "fp8", "mxfp8"'),
        (["explain", "a.json"], "explain is a command of megaloom\nuse megaloom explain a.json"),
        (["export", "a.json", "--to", "slurm"], "use megaloom export a.json --to slurm"),
        (["gpt2", "more"], "unexpected argument 'more'"),
        (["gpt2", "--tp"], "--tp needs a value"),
        (["gpt2", "--recompute-layers", "13"], "--recompute-layers 13 is more than the 12 blocks of the model"),
        (["gpt2", "--colour"], "`plan --help` lists the options"),
        (["gpt2", "--top", "0"], "--top must be at least 1, got 0"),
        (
            ["gpt2", "-o", "missing/plan.json"],
            "cannot write -o 'missing/plan.json': No such file or directory\ngive another path",
        ),
        (["gpt2", "--html", "missing/p.html"], "cannot write --html 'missing/p.html'"),
        (["gpt2", "--trace", "."], "cannot write --trace '.': it is a folder"),
        (["llama3-8b", "--gpus", "1xH100"], "no layout of llama3-8b on 1xH100 fits the memory"),
        (["llama3-70b", "--gpus", "1..2xH100"], "no layout of llama3-70b on 2xH100 fits the memory"),
        (["gpt2", "--gpus", "8..16xH100", "--tp", "0"], "tp must be at least 1, got 0"),
        (
            ["gpt2", "--gpus", "8..16xH100", "-o", "plan.json"],
            "prints a scaling table and writes no plan\ndrop `-o`, or name one cluster",
        ),
        (["gpt2", "--gpus", "8..16xH100", "--lint", "--tp", "3"], "write 8xH100"),
        (["gpt2", "--seq", "512", "--vocab-multiple", "0"], "vocab-multiple must be at least 1, got 0"),
        (["gpt2", "--seq", "512", "--vocab-multiple", "-1", "--lint"], "vocab-multiple must be at least 1, got -1"),
        (["gpt2", "--seq", "512", "--vocab-multiple", 20 * "9"], "1,048,576 or less"),
        (["gpt2", "--batch", "0", "--lint"], "batch must be at least 1, got 0"),
        (["gpt2", "--pp", "0", "--tp", "1", "--lint"], "pp must be at least 1, got 0"),
        (["gpt2", "--tp", "-1", "--lint", "--json"], "tp must be at least 1, got -1"),
        (["gpt2", "--batch", 20 * "9", "--tp", "2", "--cp", "4", "--lint"], "1,048,576 or less"),
        (["gpt2", "--recompute-layers", "13", "--lint"], "--recompute-layers 13 is more than the 12 blocks"),
        (["llama3-70b", "--gpus", "8xV100", "--precision", "fp32"], "on 8xV100 fits the memory"),
        (["gpt2", "--pareto", "--html", "plan.html"], "writes no plan\ndrop `--html`, or drop `--pareto`"),
        (["gpt2", "--gpus", "8xA100", "--precision", "fp8"], "an A100 has no known peak FLOP/s in fp8"),
    ],
)
def test_wrong_input_says_what_would_work(
    args: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*args, capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith("plan: ")
    assert says in err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_it_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megaloom.planner.search.search.plan", interrupted)
    assert run("gpt2", capsys=capsys) == (130, "", "plan: interrupted\n")


def test_ctrl_c_takes_the_best_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pushed = Frontier.push

    def interrupted(self: Frontier, seconds: float, what: object) -> None:
        pushed(self, seconds, what)
        if isinstance(what, Priced):
            raise KeyboardInterrupt

    monkeypatch.setattr(Frontier, "push", interrupted)
    code, out, err = run("gpt2", "--gpus", "8xH100", "--batch", "64", capsys=capsys)
    assert (code, err) == (130, "")
    assert re.search(r"searched for [\d.]+ s, interrupted: another layout may be at most \d+\.\d% faster\n", out)
    assert load("plan.json").layout.world == 8
    code, out, _ = run("gpt2", "--gpus", "8xH100", "--batch", "64", "--json", capsys=capsys)
    assert code == 130
    assert 0 <= json.loads(out)["possible_gain"] < 1


def command(code: str, *args: str) -> list[str]:
    return [sys.executable, "-c", f"import sys\nfrom megaloom.planner.cli.main import main\n{code}", *args]


def test_help_is_quick() -> None:
    heavy = "{'torch', 'numpy', 'networkx', 'cattrs', 'megaloom.dsl'} & set(sys.modules)"
    code = f"code = main(['--help'])\nassert not {heavy}, {heavy}\nsys.exit(code)"
    output = subprocess.run(command(code), capture_output=True, text=True, timeout=LIMIT, check=True).stdout
    assert f"Known: {', '.join(PRESETS)}." in " ".join(output.replace("│", "").split())


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    plan = subprocess.Popen(
        command("sys.exit(main())", "gpt2", "-o", str(tmp_path / "plan.json")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert plan.stdout is not None
    plan.stdout.close()
    _, err = plan.communicate(timeout=LIMIT)
    assert (plan.returncode, err) == (0, b"")


@pytest.mark.parametrize(
    ("args", "to", "code", "says"),
    [
        ("--help", "| true", 0, ""),
        ("gpt2 -o {}", ">&-", 0, ""),
        ("gpt2 -o {}", "> /dev/full", 2, "plan: cannot write the output: No space left on device\n"),
        ("--help", "> /dev/full", 2, "plan: cannot write the output: No space left on device\n"),
    ],
)
def test_output_that_goes_nowhere_is_no_traceback(args: str, to: str, code: int, says: str, tmp_path: Path) -> None:
    program = shlex.join(command("sys.exit(main())"))
    line = f"set -o pipefail; {program} {args.format(tmp_path / 'plan.json')} {to}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (code, says)
