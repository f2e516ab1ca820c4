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


def hugging_face(folder: Path, name: str, **changes: object) -> Path:
    """Write a small model of Hugging Face with random weights, and return its folder."""
    from tests.support.models.hugging_face import built

    made = folder / name
    built(name, **changes).save_pretrained(made)
    return made


def first_sample(config: Path) -> dict[str, list[int]]:
    """Return a sample of text for the model of a config.json."""
    import torch

    from megaloom.dsl import graph, read
    from megaloom.runtime.data.token_ids import TokenIds
    from megaloom.runtime.samples.samples import SampleMaker

    maker = SampleMaker.of(graph(read(config)), 32, TokenIds(40, eos=7, name="x"))
    sample = maker.make(10 + torch.arange(maker.length) % 30, 0, 1)
    return {name: x.tolist() for name, x in sample.items()}


@finding("users 1", "BART is trained with another decoder start than it is served with", Verdict.MENDED)
@finding("features D2", "BART is trained from id 0 and generates from its start id", Verdict.MENDED)
def decoder_start(folder: Path) -> str:
    tokens = first_sample(hugging_face(folder, "bart", decoder_start_token_id=2, pad_token_id=1))["tokens"]
    assert tokens[0] == 2 and tokens[-1] == 1, tokens
    return f"the decoder reads {tokens[:4]} …"


@finding("users 2", "BERT from a folder gets two segments on one running text", Verdict.MENDED)
def token_types(folder: Path) -> str:
    types = first_sample(hugging_face(folder, "bert"))["types"]
    assert set(types) == {0}, types
    return "all token types are 0"


@finding("features D3", "T5's targets have no end, so that a model never learns to stop", Verdict.MENDED)
def target_end(folder: Path) -> str:
    sample = first_sample(hugging_face(folder, "t5"))
    target = [token for token, counts in zip(sample["labels"], sample["mask"], strict=True) if counts]
    assert target[-1] == 7 and target[-2] >= 40, target
    return f"the target ends with {target[-2:]}, a sentinel and the end"


@finding("users 3", "Folders of experts train with a balancing loss that transformers would not add", Verdict.MENDED)
def balancing_loss(folder: Path) -> str:
    path = hugging_face(folder, "mixtral", vocab_size=300)
    run = ("train", "--from", str(path), "--data", text(folder), *TINY, "--steps", "1")
    passes(megaloom(folder, *run, "--set", "balance=0.02", "--out", "with"), "balancing loss 0.02")
    return passes(megaloom(folder, *run, "--out", "r"), "fine-tuning: lr 5e-05", "balancing loss 0 ")


@finding("users 4", "The correction bias of DeepSeek-V3's routers moves in a fine-tuning", Verdict.MENDED)
def correction_bias(folder: Path) -> str:
    path = hugging_face(folder, "deepseek-v3", vocab_size=300)
    run = ("train", "--from", str(path), "--data", text(folder), *TINY, "--steps", "2", "--warmup", "0", "--out", "r")
    said = passes(megaloom(folder, *run), "correction biases move by 0 a step")
    passes(megaloom(folder, "convert", "r", "--to", "hf", "-o", "h"))
    from safetensors.torch import load_file

    before, after = load_file(path / "model.safetensors"), load_file(folder / "h" / "model.safetensors")
    names = [name for name in before if name.endswith("e_score_correction_bias")]
    assert names and all(bool((before[name] == after[name]).all()) for name in names)
    return said


@finding("users 10", "Nemotron-H does not clamp its steps at time_step_min", Verdict.MENDED)
def least_step(folder: Path) -> str:
    from megaloom.dsl import Mamba2, graph, read

    config = hugging_face(folder, "nemotron-h", time_step_min=0.3)
    bounds = {n.op.dt for n in graph(read(config)).nodes if isinstance(n.op, Mamba2)}
    assert bounds == {(0.3, None)}, bounds
    return "steps are at least time_step_min; logits are compared in tests/dsl/hf/test_hugging_face.py"
