"""Findings about objectives, made-up data, learning rates, and the defaults of fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.findings.finding import Verdict, finding, megaloom, passes, refuses

TINY = ("--seq", "32", "--batch", "4", "--devices", "1")
GPT = """
from megaloom.dsl import Model
from megaloom.examples.gpt2 import gpt


def tiny() -> Model:
    return gpt("tiny", layers=1, heads=2, embed=16, vocab=256, seq=64)
"""


def text(folder: Path) -> str:
    """Write a file of text, and return its name."""
    (folder / "text.txt").write_text("".join(f"{i} foxes and {i * i} dogs. " for i in range(400)))
    return "text.txt"


def rates(run: Path) -> list[float]:
    """Return the learning rate of each step of a run."""
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [event["lr"] for event in events if event["event"] == "step"]


@finding("spotcheck N1", "A learning rate at or below 1e-4 never decays", Verdict.MENDED)
def lowest_learning_rate(folder: Path) -> str:
    (folder / "model.py").write_text(GPT)
    run = ("train", "model.py", "--data", text(folder), *TINY, "--lr", "5e-5", "--schedule", "linear")
    passes(megaloom(folder, *run, "--steps", "6", "--warmup", "0", "--out", "r"))
    found = rates(folder / "r")
    assert found == sorted(found, reverse=True) and found[-1] < 2e-5, found
    return refuses(megaloom(folder, *run, "--min-lr", "6e-5"), "--min-lr 6e-05 is above --lr 5e-05")


@finding("features D8", "After --epochs the command to train further doubles the default of --steps", Verdict.MENDED)
def further_epochs(folder: Path) -> str:
    (folder / "model.py").write_text(GPT)
    run = ("train", "model.py", "--data", text(folder), *TINY, "--schedule", "constant", "--epochs", "0.1")
    ended = megaloom(folder, *run, "--out", "r")
    assert "--steps" not in ended.text, ended.end
    return passes(ended, "--epochs 0.2")


CLASSES = """
from megaloom.dsl import *


def classifier() -> Model:
    d = Dim("embed", 16)
    x = apply(Select("seq", 0), ids() >> Embed(weight("wte", Dim("vocab", 300), d)))
    return model("classifier", x >> Unembed(weight("classes", Dim("vocab", 5), d)) >> Classification())
"""


@finding("features D1", "A classifier trains on random labels, a ViT on random images, in silence", Verdict.REFUSED)
def made_up_labels(folder: Path) -> str:
    (folder / "model.py").write_text(CLASSES)
    run = ("train", "model.py", *TINY, "--steps", "2", "--out", "r")
    passes(megaloom(folder, *run, "--data", "synthetic"), "made up", "synthetic classification", "synthetic samples")
    refuses(megaloom(folder, "evaluate", "r", "--data", text(folder)), "--data text.txt has none")
    return refuses(megaloom(folder, *run, "--data", text(folder)), "classifier needs the class of each sample")
