"""Findings about reports: the sentences below "Why", tables, messages."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path

from rich.console import Console

from tests.support.findings.finding import Verdict, finding, left, megaloom, passes, plan, refuses

CASES = (("llama3-8b", "64xH100", "4096"), ("llama3-70b", "256xH100", "8192"), ("mamba2-2-7b", "128xA100", "4096"))


@finding("newcomer A5", "The causes below Why contradict the difference that they explain", Verdict.MENDED)
def causes(folder: Path) -> str:
    """Recompute each sentence "With ... it is x% slower: causes" of three plans."""
    count = 0
    for model, gpus, seq in CASES:
        text = plan(folder, model, "--gpus", gpus, "--seq", seq)
        passes(text)
        step = _seconds(re.findall(r"takes ([\d.]+ (?:s|ms)) a step", text.text)[0])
        for share, named in re.findall(r"it is ([\d.]+)% slower: (.*)\.\n", text.text):
            parts = [_seconds(amount) for amount in re.findall(r"[+−][\d.]+ (?:s|ms)", named)]
            more = float(share) / 100 * step
            rounding = 0.0006 * step + 0.006 * sum(map(abs, parts))
            assert abs(sum(parts) - more) <= 0.2 * more + rounding, f"{model}: {share}% slower: {named}"
            count += 1
    assert count >= 6
    return f"{count} sentences of {len(CASES)} plans add up to 80 % or more"


def _seconds(text: str) -> float:
    amount, unit = text.replace("−", "-").split(" ")
    return float(amount) * (1e-3 if unit == "ms" else 1.0)


@finding("newcomer A6", "Tables break words in the middle at 80 columns", Verdict.MENDED)
def narrow(folder: Path) -> str:
    from megaloom.dsl.catalog import find
    from megaloom.dsl.graph import graph
    from megaloom.planner.contract.plan_json import load
    from megaloom.planner.report.text import plan_summary

    passes(plan(folder, "llama3-70b", "--gpus", "64xH100", "--seq", "4096"))
    shown, g = load(folder / "plan.json"), graph(find("llama3-70b")[0])
    words: list[set[str]] = []
    for width in (1000, 80):
        text = StringIO()
        Console(file=text, width=width, color_system=None, force_terminal=True).print(plan_summary(shown, g))
        assert max(map(len, text.getvalue().splitlines())) <= width
        words.append(set(text.getvalue().split()))
    assert words[1] <= words[0], f"broken words: {sorted(words[1] - words[0])}"
    return "a plan of 8 pipeline ranks has whole words in 80 columns"


@finding("newcomer B5", "Two shares are called bubble", Verdict.MENDED)
def bubble(folder: Path) -> str:
    done = plan(folder, "gpt3-175b", "--gpus", "512xA100", "--seq", "2048", "--pp", "8")
    passes(done)
    share = next(line.split()[3] for line in done.text.splitlines() if line.startswith("pipeline bubble"))
    row = next(line for line in done.text.splitlines() if re.search(r"GiB +[\d.]+% +[\d.]+%$", line))
    assert row.split()[-2] == share, f"{row.split()[-2]} above, {share} below"
    return f"both are {share} of the step"


@finding("newcomer B11", "Export to Megatron-LM does not say whose kernels the plan was made for", Verdict.MENDED)
def other_kernels(folder: Path) -> str:
    passes(plan(folder, "llama3-8b", "--gpus", "8xH100"))
    done = megaloom(folder, "export", "plan.json", "--to", "megatron-lm", "-o", "run.sh")
    return passes(done, "plan --runtime megatron", "wrote run.sh")


@finding("features D6", "The message on a checkpoint from before megatron-core hides the reason", Verdict.MENDED)
def before_core(folder: Path) -> str:
    import torch

    rank = folder / "old" / "iter_0080000" / "mp_rank_00"
    rank.mkdir(parents=True)
    torch.save({"model": {"language_model": {"embedding": {}}}}, rank / "model_optim_rng.pt")
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 64}
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 300, "n_positions": 64}))
    words = ("convert", "old/iter_0080000", "--to", "hf", "--config", "config.json", "-o", "out")
    refuses(megaloom(folder, *words), "missing: embedding.word_embeddings.weight")
    return "such checkpoints are read; of this one, which has no tensors, the missing ones are named"


@finding("spotcheck N9 advice", "The advice for a JSON that is no plan overwrites the user's file", Verdict.MENDED)
def advice(folder: Path) -> str:
    (folder / "nemo.json").write_text('{"model": {"num_layers": 4}}')
    done = megaloom(folder, "explain", "nemo.json")
    assert "-o nemo.json" not in done.text, done.end
    return refuses(done, "is JSON, but not a plan", "`plan MODEL` writes plan.json")


@finding("spotcheck N9 recompute", "Help names a default of --recompute-modules that is not used", Verdict.MENDED)
def recompute(folder: Path) -> str:
    text = " ".join(plan(folder, "--help").text.replace("│", " ").split())
    assert "Default: core_attn" not in text
    assert "The search chooses them if none are given" in text
    return "help says that the search chooses them"


@finding("features D5", "A run of a declared model cannot begin a new run", Verdict.MENDED)
def from_run(folder: Path) -> str:
    sizes = ("--set", "layers=1", "--set", "embed=32", "--set", "heads=2", "--set", "kv_heads=1")
    options = ("--devices", "1", "--seq", "16", "--batch", "2", "--steps", "1", "--evaluate-batches", "1")
    passes(megaloom(folder, "train", "stdlib-gpt", *sizes, *options, "--out", "old"))
    return passes(megaloom(folder, "train", "--from", "old", *options, "--out", "new"), "weights from old, step 1")


left(
    "newcomer B6",
    "Plans that the prediction cannot tell apart are presented as first and second",
    "the interval is that of one prediction; errors of two layouts of one model are correlated, and no published data "
    "say how much. A tie is still only a difference below 0.05 %",
)
left(
    "newcomer C",
    "Small things",
    "mended: no pipeline rank is named where there is none; bars of the scaling table have a title; export says what "
    "it wrote. Left: --version, shell completion, progress of validate and measure, what-if pages",
)
