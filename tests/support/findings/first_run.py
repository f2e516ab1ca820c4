"""Findings on starts, signals, evaluations at the end, and the first run on a machine."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.findings.finding import Verdict, finding, megaloom, passes, plan, refuses

TINY = ("--seq", "32", "--batch", "4", "--devices", "2", "--steps", "1")


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `megaloom` in a folder, with stdout and stderr in one pipe."""
    command = [sys.executable, "-u", "-m", "megaloom.runtime.cli", *arguments]
    own = os.environ | {"OMP_NUM_THREADS": "1", "MEGALOOM_MACHINE": "2xCPU"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=own, text=True, stdout=pipe, stderr=subprocess.STDOUT)


def handles(process: subprocess.Popen[str], number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return bool(caught and int(caught[1], 16) >> (number - 1) & 1)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def launched(rank: int, world: int) -> dict[str, str]:
    """Return the variables of a rank that somebody started by hand."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }


@finding("users 13", "A rank beyond WORLD_SIZE, and ranks that do not come, end in torch's traceback", Verdict.REFUSED)
def wrong_launch(folder: Path) -> str:
    refuses(megaloom(folder, "train", "stdlib-gpt", "--devices", "2", **launched(3, 1)), "RANK=3 is not a rank of")
    short = ("train", "stdlib-gpt", "--distributed-timeout-minutes", "0.02")
    return refuses(megaloom(folder, *short, **launched(0, 3)), "2 of 3 ranks have not come within 0.02 min")


@finding("users 14", "--devices that differs from WORLD_SIZE is found only after the timeout", Verdict.REFUSED)
def other_world(folder: Path) -> str:
    ended = megaloom(folder, "train", "stdlib-gpt", "--devices", "2", "--tp", "2", seconds=100, **launched(0, 3))
    return refuses(ended, "the plan is for 2 ranks, but 3 were started")


def verify_large(folder: Path) -> str:
    """Verify a plan that this machine cannot hold."""
    plan(folder, "llama3-8b", "--gpus", "8xH100", "--pp", "1", "-o", "large.json")
    ended = megaloom(folder, "verify", "large.json", seconds=60)
    return refuses(ended, "8 ranks need", "the plan is for 8xH100: verify it there, or a smaller model here")


for name in ("newcomer A2", "fuzz D7"):
    finding(name, "`verify` of a plan for GPUs eats the memory of a machine without", Verdict.REFUSED)(verify_large)


@finding("users 12", "Signals before ranks run kill the command without a word, also SIGUSR2", Verdict.MENDED)
def signals_at_the_start(folder: Path) -> str:
    process = started(folder, "train", "stdlib-gpt", *TINY)
    while not handles(process, signal.SIGUSR2):
        assert process.poll() is None
    process.send_signal(signal.SIGUSR2)
    assert process.stdout
    assert "SIGUSR2 heard; ignored" in (first := process.stdout.readline()), first
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 143 and "SIGTERM heard; stopping" in text and "Traceback" not in text, text
    return text.strip().splitlines()[-1]


def stopped_evaluation(folder: Path) -> str:
    """Stop the evaluation at the end of a run of one step."""
    process = started(folder, "train", "stdlib-gpt", *TINY, "--evaluate-all", "--out", "run")
    assert process.stdout
    assert any(line.startswith("evaluating all ") for line in process.stdout)
    assert (folder / "run" / "step-000001").is_dir(), "the last checkpoint is not saved before the evaluation"
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 143 and "SIGTERM heard" in text, text
    assert "step-000001 is saved" in text, text
    return next(line for line in text.splitlines() if "stopped after" in line)


for name in ("newcomer B3", "features D10"):
    words = "A signal waits for the end of the evaluation at the end"
    finding(name, words, Verdict.MENDED)(stopped_evaluation)


@finding(
    "newcomer B2", "The evaluation at the end is far longer than a short run, and silent in a pipe", Verdict.MENDED
)
def short_evaluation(folder: Path) -> str:
    return passes(megaloom(folder, "train", "stdlib-gpt", *TINY, MEGALOOM_MACHINE="2xCPU"), "evaluating 128 of")


@finding("newcomer B1", "A first run outside its interval does not say why", Verdict.MENDED)
def first_run(folder: Path) -> str:
    load = ("--seq", "32", "--batch", "4", "--devices", "2", "--steps", "10")
    ended = megaloom(folder, "train", "stdlib-gpt", *load, XDG_CACHE_HOME=str(folder), MEGALOOM_MACHINE="")
    line = passes(ended, "measured this machine: 2 processes of 1 thread")
    low, high = map(float, re.findall(r"\((\d[\d.]*)-(\d[\d.]*)\)", ended.text)[0])
    unit = 1e3 if "ms/step" in ended.text else 1.0
    taken = re.search(r"step time +([\d.]+) s", ended.text)
    assert taken
    outside = not low <= float(taken[1]) * unit <= high
    said = re.search(r"(slower|faster) than the 90% interval of the plan, .*[:;]", ended.text)
    assert bool(said) == outside or abs(float(taken[1]) * unit / (high if outside else low) - 1) < 0.05, ended.end
    return line


@finding("newcomer A8", "`megaloom train` advises --gpus, which it does not know", Verdict.MENDED)
def advice(folder: Path) -> str:
    ended = megaloom(folder, "train", "llama3-8b", MEGALOOM_MACHINE="4xCPU")
    said = refuses(ended, "no layout of llama3-8b on 4xCPU fits the memory")
    assert "--gpus" not in ended.text and "40xCPU" not in ended.text, ended.end
    return said


@finding("users 17", "`ulimit -v` ends in a traceback of imports", Verdict.REFUSED)
def little_address_space(folder: Path) -> str:
    for limit in (300, 700):
        command = [sys.executable, "-m", "megaloom.runtime.cli", "train", "stdlib-gpt", *TINY]
        limits = (limit * 2**20, limit * 2**20)
        done = subprocess.run(
            command,
            cwd=folder,
            text=True,
            capture_output=True,
            check=False,
            timeout=200,
            preexec_fn=lambda limits=limits: resource.setrlimit(resource.RLIMIT_AS, limits),
        )
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-600:]
        assert "GiB of address space: raise the limit" in done.stderr, done.stderr[-600:]
    return done.stderr.strip().splitlines()[-1]


@finding("users 18", "What can be refused at once is refused after a search and a page of reasons", Verdict.REFUSED)
def refused_at_once(folder: Path) -> str:
    (folder / "file").write_text("no folder")
    for arguments, words in (
        (("--data", "nowhere"), "no file or folder nowhere"),
        (("--out", "file/run"), "cannot write into --out 'file/run'"),
        (("--set", "vocab=100"), "has a vocabulary of 100; text is read as bytes"),
    ):
        ended = megaloom(folder, "train", "stdlib-gpt", *arguments)
        said = refuses(ended, words)
        assert "Why" not in ended.text and "measured" not in ended.text, ended.end
    return said
