"""The unchanged inputs of the campaign: plans, a cluster file, data, a run. They are made once, by the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.paths import TESTS

READY = "ready"
CLUSTER = """base = "H100"
count = 16
per_node = 8
nics = 4
pod = 16
oversubscription = 2.5

[device]
bandwidth_efficiency = 0.8

[inter]
bandwidth = 25e9
latency = 4e-6
"""
SETTINGS = """[model]
layers = 2
heads = 2
embed = 32

[plan]
gpus = "4xH100"
seq = 64
batch = 8

[train]
steps = 1
seq = 16
batch = 2
devices = 1
"""
SIZES = ("--set", "layers=1", "--set", "heads=2", "--set", "embed=32", "--set", "vocab=300")
RECIPE = ("--devices", "1", "--seq", "16", "--batch", "2", "--evaluate-batches", "1")


def make_bases(folder: Path) -> Path:
    """Return a folder with all unchanged inputs, after making them if they are not there."""
    if (folder / READY).exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make_light_bases(folder)
    _megaloom(folder, "plan", "stdlib-gpt", "--gpus", "4xH100", "--seq", "64", "--batch", "8", "-o", "plan.json")
    _megaloom(
        folder, "plan", "gpt2", "--gpus", "8xA100", "--pp", "2", "--seq", "512", "--batch", "32", "-o", "gpt2.json"
    )
    _megaloom(folder, "plan", "stdlib-gpt", "--gpus", "8xcluster.toml", "--seq", "64", "--batch", "8", "-o", "own.json")
    texts = [f"Document {i}: the quick brown fox jumps over {i} lazy dogs, again and again." for i in range(80)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    _megaloom(folder, "data", "text.jsonl", "-o", "ds", "--train-vocab", "300")
    _megaloom(folder, "train", "stdlib-gpt", *SIZES, "--data", "ds", *RECIPE, "--steps", "2", "--out", "run")
    _megaloom(folder, "pack", "run", "-o", "run.megaloom")
    (folder / READY).touch()
    return folder


def make_light_bases(folder: Path) -> None:
    """Write the unchanged inputs that no command makes."""
    (folder / "cluster.toml").write_text(CLUSTER)
    (folder / "settings.toml").write_text(SETTINGS)
    shutil.copytree(TESTS / "configs" / "small", folder / "configs")


def _megaloom(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "megaloom.runtime.cli", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stdout}{done.stderr}")
