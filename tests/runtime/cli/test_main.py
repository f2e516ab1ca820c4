"""The `megaloom` command: its output; for bad input one message on stderr, no traceback, no process left running."""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import psutil
import pytest

from megaloom.planner.contract.capability import assumed_environment, capability
from megaloom.planner.contract.plan_json import load
from megaloom.planner.contract.plans import PLAN_VERSION
from megaloom.planner.contract.workload import Precision, Runtime
from megaloom.planner.rules.capabilities import OWN_RUNTIME
from megaloom.runtime.cli.defaults import TrainedPrecision
from megaloom.runtime.cli.main import main
from megaloom.runtime.training.run_folder import locked
from tests.support.forked_command import ForkedCommand, run_forked
from tests.support.limits import LIMIT
from tests.support.paths import TEST_MODELS

MODELS = TEST_MODELS / "small.py"
SMALL = ("--seq", "32", "--batch", "4", "--devices", "2", "--warmup", "2", "--lr", "1e-2")
PROGRAM = "import sys; from megaloom.runtime.cli.main import main; sys.exit(main())"


def start(*args: object, cwd: Path) -> ForkedCommand:
    """The command as a process of its own, in a folder of its own."""
    return ForkedCommand(tuple(map(str, args)), cwd)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for path in Path(__file__).parent.glob("test_*.py"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[Path, str]:
    """The folder in which a model was trained to its end, and what was shown."""
    cwd = tmp_path_factory.mktemp("work")
    result = run_forked("train", f"{MODELS}:byte_llama", "--data", text, *SMALL, "--steps", "6", cwd=cwd)
    assert (result.returncode, result.stderr) == (0, "")
    return cwd, result.stdout


def test_train_shows_plan_progress_and_summary(done: tuple[Path, str]) -> None:
    cwd, shown = done
    folder = cwd / "runs" / "byte-llama"
    plan = load(folder / "plan.json")
    assert all(reason in shown for reason in plan.reasons)
    assert "byte-llama: 78,208 parameters on 2xCPU" in shown
    speed = r"[\d,]+ tokens/s/process  0\.\d+ TFLOP/s/process  MFU \d+\.\d%  memory \d+ MiB"
    times = r"0:\d\d elapsed  0:00 left"
    assert re.search(rf"step 6/6  loss \d\.\d+  lr \d\S+  grad norm \d\S+  {speed}  {times}\n", shown)
    assert re.search(r"held-out loss +\d\.\d{3} nats per byte, \d\.\d{3} bits", shown)
    assert re.search(r"perplexity +\d+\.\d{3} over [\d,]+ held-out tokens", shown)
    assert re.search(r"unigram entropy +\d\.\d{3} nats per byte", shown)
    assert re.search(r"step time +0\.\d{3} s \(predicted \d\.\d{3} s\)", shown)
    assert re.search(r"tokens/s/process +[\d,]+ \(predicted [\d,]+\)", shown)
    assert re.search(r"TFLOP/s/process +0\.\d+ \(predicted 0\.\d+\)", shown)
    assert re.search(r"MFU +\d+\.\d% \(predicted \d+\.\d%\)", shown)
    assert re.search(r"peak memory +\d+\.\d MiB \(predicted \d+\.\d\)", shown)
    assert re.search(r"checkpoint +runs/byte-llama/step-000006", shown)
    event = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert event["step"] == 1
    for name in ("tokens_per_second_per_device", "flops_per_second_per_device", "mfu"):
        expected = getattr(plan.predicted, name) * plan.predicted.step_seconds
        assert event[name] * event["seconds"] == pytest.approx(expected)  # equal work
    assert event["peak_nbytes"] > 2**20


def test_the_command_to_go_on_goes_on(done: tuple[Path, str], tmp_path: Path) -> None:
    cwd, shown = done
    shutil.copytree(cwd / "runs", tmp_path / "runs")
    command = re.search(r"to train further: \S+ (train .*)", shown)
    assert command
    words = command[1].split()
    assert words[words.index("--steps") + 1] == "12"
    assert "the learning rate stays at 0.001; --decay-steps 12 stretches its schedule" in shown
    result = run_forked(*words, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "resumed from step 6 of 12 (runs/byte-llama/step-000006)" in result.stdout
    assert re.search(r"steps +12 \(resumed from 6\)", result.stdout)
    assert "learning rate: its schedule ends at step 6; --decay-steps 12 would stretch it" in result.stdout
    events = map(json.loads, (tmp_path / "runs" / "byte-llama" / "metrics.jsonl").read_text().splitlines())
    rates = [event["lr"] for event in events if event["event"] == "step"]
    assert rates[3:6] == sorted(rates[3:6], reverse=True)
    assert rates[6:] == pytest.approx([1e-3] * 6)


def test_run_again_after_its_end_it_says_so(done: tuple[Path, str], text: Path) -> None:
    cwd, shown = done
    plan = cwd / "runs" / "byte-llama" / "plan.json"
    result = run_forked("train", plan, "--data", text, "--steps", "6", cwd=cwd)
    assert (result.returncode, result.stderr) == (0, "")
    assert "resumed from the finished run (runs/byte-llama/step-000006)" in result.stdout
    held_out = re.search(r"held-out loss +\d.*", shown)
    assert held_out
    assert held_out[0] in result.stdout
    assert re.search("to train further: .* --steps 12", result.stdout)
    assert "recipe: warmup was 2, is now 20" in result.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_stopped_it_saves_and_goes_on_from_there(number: signal.Signals, text: Path, tmp_path: Path) -> None:
    long = ("train", f"{MODELS}:byte_llama", "--data", text, *SMALL, "--steps")
    process = start(*long, 5000, cwd=tmp_path)
    assert process.stdout
    for line in process.stdout:
        if line.startswith("step "):
            break
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) == 2
    process.send_signal(number)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + number
    saved = re.fullmatch(
        rf"megaloom: {number.name} heard; the run stops after this step or batch, and saves; a second signal .*\n"
        r"megaloom: stopped; (runs/byte-llama/step-0*(\d+)) is saved; the same command continues from it\n",
        err,
    )
    assert saved, err
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    step = int(saved[2])
    assert step >= 1
    again = run_forked(*long, step + 1, cwd=tmp_path)
    assert again.returncode == 0
    assert f"resumed from step {step} of {step + 1} ({saved[1]})" in again.stdout


def test_asked_to_save_it_saves_and_goes_on(text: Path, tmp_path: Path) -> None:
    process = start("train", f"{MODELS}:byte_llama", "--data", text, *SMALL, "--steps", 5000, cwd=tmp_path)
    assert process.stdout
    next(line for line in process.stdout if line.startswith("step "))
    process.send_signal(signal.SIGUSR2)
    deadline = time.monotonic() + LIMIT
    while not (saved := list(tmp_path.glob("runs/*/step-??????"))):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGUSR1
    assert "SIGUSR2 heard; the run saves after this step, and goes on" in err
    assert saved[0].name not in err


def handles(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return bool(caught and int(caught[1], 16) >> (number - 1) & 1)


def test_while_it_starts_it_hears_signals(text: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megaloom.runtime.cli", "train", f"{MODELS}:byte_llama", "--data", str(text)]
    process = subprocess.Popen(command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not handles(process, signal.SIGUSR2):
        assert process.poll() is None
    process.send_signal(signal.SIGUSR2)
    assert process.stderr
    assert "SIGUSR2 heard; ignored" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, err) == (143, "megaloom: SIGTERM heard; stopping\n")
    assert not (tmp_path / "runs").exists()


def test_an_evaluation_at_the_end_stops_between_batches(text: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"{i} " for i in range(10**6)))
    train = ("train", f"{MODELS}:byte_llama", "--data", "text", *SMALL, "--steps", 1)
    process = start(*train, "--evaluate-all", cwd=tmp_path)
    assert process.stdout
    next(line for line in process.stdout if line.startswith("evaluating all "))
    assert list(tmp_path.glob("runs/*/step-000001"))  # saved before
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 143
    assert re.search(r"step 1  stopped after [\d,]+ of [\d,]+ held-out tokens", out), out
    assert "stopped; runs/byte-llama/step-000001 is saved; the same command continues from it" in err
    short = run_forked(*train, cwd=tmp_path)
    assert re.search(r"evaluating 128 of \d\d\d,\d{3} held-out tokens, as many as the run has trained on", short.stdout)
    assert "over 128 held-out tokens" in short.stdout


def test_its_reader_leaves_and_it_saves(text: Path, tmp_path: Path) -> None:
    process = start("train", f"{MODELS}:byte_llama", "--data", text, *SMALL, "--steps", 5000, cwd=tmp_path)
    assert process.stdout
    assert process.stderr
    next(line for line in process.stdout if line.startswith("step "))
    process.stdout.close()
    message = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=LIMIT) == 128 + signal.SIGPIPE
    assert re.fullmatch(r"megaloom: stopped; runs/byte-llama/step-\d+ is saved; the same .*\n", message), message


def test_killed_it_leaves_nobody_and_nothing_broken(text: Path, tmp_path: Path) -> None:
    always = ("train", f"{MODELS}:byte_llama", "--data", text, *SMALL, "--save-every", 1, "--steps")
    process = start(*always, 5000, cwd=tmp_path)
    while not list(tmp_path.glob("runs/*/step-??????")):
        assert process.poll() is None
        time.sleep(0.01)
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert not psutil.wait_procs(ranks, timeout=LIMIT)[1]
    again = run_forked(*always, 1, cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    assert "resumed from the finished run" in again.stdout


def plain(shown: bytes) -> str:
    """Return the text sent to a terminal, without colours and cursor movements."""
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown.decode())


def test_on_a_terminal_all_figures_are_redrawn(text: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    args = ["train", f"{MODELS}:byte_llama", "--data", str(text), *SMALL, "--steps", "3"]
    env = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *args], cwd=tmp_path, stdout=theirs, env=env)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how Linux says that the other side has closed it
        while chunk := os.read(ours, 4096):
            shown += chunk
    assert process.wait(timeout=LIMIT) == 0
    assert re.search(r"step 3/3 .*0:00 left\s+loss \d.*lr \d.*grad norm \d.*\s+[\d,]+ tokens/s/process", plain(shown))
    assert re.search(r"TFLOP/s/process  MFU \d+\.\d%  memory \d+ MiB", plain(shown))
    assert "held-out loss" in shown.decode()
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l")  # the cursor is there again


def test_two_runs_in_one_folder(done: tuple[Path, str], text: Path) -> None:
    cwd, _ = done
    with locked(cwd / "runs" / "byte-llama"):
        result = run_forked("train", f"{MODELS}:byte_llama", "--data", text, *SMALL, cwd=cwd)
    assert result.returncode == 2
    assert "another run is training in runs/byte-llama" in result.stderr


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return the stderr of the command for bad input, run in this process and in an empty folder."""

    def refused(*args: object, code: int = 2) -> str:
        monkeypatch.chdir(tmp_path)
        assert main([str(arg) for arg in args]) == code
        err = capsys.readouterr().err
        assert err.startswith("megaloom: ")
        assert "Traceback" not in err
        return err

    return refused


BAD = {
    "unknown model": (("train", "llama9"), "no model 'llama9'.*\nMODEL can be file.py:name, .*, such as .*llama3-8b"),
    "no such file": (("train", "nowhere.py:x"), "no file 'nowhere.py'"),
    "no such plan": (("train", "nowhere.json"), "cannot read a plan from nowhere.json: No such file"),
    "no such plan to verify": (("verify", "nowhere.json"), "cannot read a plan from nowhere.json: No such file"),
    "a layout that does not divide": (("train", "--tp", "3"), r"3.*\[\w+(-\w+)*\]"),
    "a batch that does not divide": (("train", "--batch", "30", "--dp", "4"), r"30.*\[\w+(-\w+)*\]"),
    "a batch that does not fit": (
        ("train", "--batch", "4096", "--micro-batch", "1024", "--seq", "4096"),
        r"(GiB|memory)(.|\n)*nearest|--",
    ),
    "more processes than devices": (("train", "--devices", "5000"), "5000 ranks are too many.*plan for at most"),
    "no devices": (("train", "--devices", "0"), "the number of devices must be at least 1, got 0"),
    "missing data": (
        ("train", "--data", "nowhere"),
        "no file or folder nowhere\ngive a file or a folder",
    ),
    "no steps": (("train", "--steps", "0"), "--steps 0 is out of range\ngive a value from 1 to"),
    "a rate that is no number": (("train", "--lr", "nan"), "--lr nan is out of range\ngive a value from"),
    "a mean that forgets nothing": (
        ("train", "--beta1", "1"),
        "--beta1 1 is out of range\n.* 0 to 0.999999",
    ),
    "half a step": (("train", "--steps", "1.5"), "--steps must be a whole number, got '1.5'"),
    "no name of a folder": (("train", "--out", ""), "--out is an empty path; for the current folder write ."),
    "saving never": (("train", "--save-every", "0"), "--save-every must be at least 1, got 0"),
    "a precision that the runtime does not train": (("train", "--precision", "fp8"), "--precision(.|\n)*fp16"),
    "an overlap that the runtime does not run": (
        ("train", "--tp", "2", "--sequence-parallel", "--overlap", "tensor"),
        r"the runtime does not run `--overlap tensor` \[runtime-overlap\]\nuse `--overlap gradients weights`",
    ),
    "an unknown schedule": (("train", "--schedule", "step"), "--schedule(.|\n)*wsd"),
    "unknown option": (("train", "--learning-rate", "1"), "--learning-rate(.|\n)*`megaloom train --help`"),
    "unknown command": (("trane",), "trane"),
    "a number that is none": (("train", "--steps", "many"), "many"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_in_one_message(case: str, say: Callable[..., str]) -> None:
    args, message = BAD[case]
    assert re.search(message, words := say(*args)), words


def test_help_offers_what_the_runtime_trains(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "[choices: fp32, bf16, fp16, fp8]" in shown
    assert "Communication that runs while devices compute: gradients, weights; or none." in shown
    with_engine = capability(Runtime.MEGALOOM, assumed_environment(Runtime.MEGALOOM, "H100", precision=Precision.FP8))
    assert set(get_args(TrainedPrecision)) == {str(precision) for precision in with_engine.precisions}
    assert not int(OWN_RUNTIME.microbatch_overlaps)


@pytest.mark.parametrize("command", ["train", "verify"])
def test_a_plan_that_the_runtime_does_not_run(command: str, say: Callable[..., str], tmp_path: Path) -> None:
    model = f"{MODELS}:byte_llama"
    options = ("--seq", "32", "--batch", "4", "--tp", "2", "--sequence-parallel", "--overlap", "tensor")
    assert (
        main(["plan", model, "--gpus", "2xCPU", "--precision", "fp32", *options, "-o", str(tmp_path / "p.json")]) == 0
    )
    assert "the runtime does not run `--overlap tensor` [runtime-overlap]" in say(command, tmp_path / "p.json")


def test_empty_data(say: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no UTF-8 text in empty (0 files)" in say("train", "--data", "empty")
    os.mkfifo(tmp_path / "pipe")
    assert "no UTF-8 text in pipe (1 file: 1 not regular)" in say("train", "--data", "pipe")
    (tmp_path / "little.txt").write_text("a few words")
    assert "the training text has 12 tokens, too few for --seq 128" in say("train", "--data", "little.txt")
    assert not (tmp_path / "runs").exists()  # nothing is left of a run that did not start


def test_a_corrupt_and_a_foreign_plan(say: Callable[..., str], done: tuple[Path, str], tmp_path: Path) -> None:
    text = (done[0] / "runs" / "byte-llama" / "plan.json").read_text()
    plan = tmp_path / "plan.json"
    for damaged, message in (
        (text[: len(text) // 2], "is not JSON"),
        ("{}", "is JSON, but not a plan"),
        (text.replace(f'"version": {PLAN_VERSION}', '"version": 99'), "is a plan of version 99; this megaloom"),
        (re.sub('"fingerprint": "[^"]*"', '"fingerprint": "1-0"', text), "the plan is for another model"),
        (re.sub('"fingerprint": "[^"]*"', '"fingerprint": "0"', text), "made by another version of megaloom"),
        (re.sub('"micro_batch": [0-9]+', '"micro_batch": 3', text), "the plan is not legal: a batch of 4 is not"),
    ):
        assert damaged != text
        plan.write_text(damaged)
        for command in ("train", "verify"):
            assert message in say(command, plan)
    plan.write_text(text)
    assert "is a plan, which decides --seq" in say("train", plan, "--seq", 64)


def test_a_damaged_and_a_foreign_checkpoint(say: Callable[..., str], done: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(done[0] / "runs", tmp_path / "runs")
    folder = tmp_path / "runs" / "byte-llama"
    assert "holds checkpoints of another model" in say("train", f"{MODELS}:byte_gpt", "--seq", 32, "--out", folder)
    (folder / "step-000006" / ".metadata").unlink()
    message = say("train", folder / "plan.json")
    assert "step-000006 is damaged: .metadata is missing" in message
    assert "remove that folder to start at step 0, or choose another folder with --out" in message


def test_verify_shows_both_curves(done: tuple[Path, str]) -> None:
    cwd, _ = done
    result = run_forked("verify", "runs/byte-llama/plan.json", cwd=cwd)
    assert (result.returncode, result.stderr) == (0, "")
    assert len(re.findall(r"^ +\d +\d\.\d{6} +\d\.\d{6} +[+-]\d", result.stdout, re.MULTILINE)) == 3
    assert "passed: losses differ by at most" in result.stdout
    assert "the tolerance for fp32 over gloo is 1e-05" in result.stdout


def test_plan_is_a_command_of_it(say: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no model 'llama9'" in say("plan", "llama9")
    assert main(["plan", f"{MODELS}:byte_llama", "--gpus", "2xCPU", "--seq", "32", "-o", str(tmp_path / "p.json")]) == 0
    assert load(tmp_path / "p.json").layout.world == 2


def test_verify_needs_a_step(say: Callable[..., str], tmp_path: Path) -> None:
    path = str(tmp_path / "p.json")
    assert main(["plan", f"{MODELS}:tiny_gpt_dropout", "--gpus", "2xCPU", "--seq", "32", "-o", path]) == 0
    assert "--steps must be at least 1, got 0" in say("verify", path, "--steps", 0)


def test_help_is_quick_and_loads_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from megaloom.runtime.cli.main import main; main(['train', '-h']); print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True, cwd=tmp_path)
    assert shown.stdout.splitlines()[-1] == "False"
    assert "--steps" in shown.stdout


def test_threads_that_wait_sleep() -> None:
    """OpenMP, which prints what it has read, was loaded after the program had set its policy."""
    program = (
        "from megaloom.runtime.cli import __main__ as cli; cli._run = lambda: __import__('torch') and 0; "
        "cli.run_program()"
    )
    env = {**os.environ, "OMP_DISPLAY_ENV": "true"}
    shown = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True, env=env)
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in shown.stderr


def test_under_torchrun_it_is_one_of_many(text: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"if __name__ == '__main__':\n    {PROGRAM}\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    args = ["train", f"{MODELS}:byte_llama", "--data", str(text), "--seq", "32", "--batch", "4", "--steps", "3"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, *args], text=True, capture_output=True, cwd=tmp_path, timeout=LIMIT, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("on 2xCPU") == 1
    assert done.stdout.count("to train further: ") == 1
    assert "step 3/3" in done.stdout
    assert "Traceback" not in done.stderr
