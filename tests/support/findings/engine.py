"""Findings in the engine and in bodies: training that was wrong without a word, or stopped in the first step."""

from __future__ import annotations

from pathlib import Path

from tests.support.findings.finding import Verdict, finding, megaloom, passes, plan
from tests.support.paths import ROOT, TEST_MODELS

LOAD = ("--seq", "32", "--precision", "fp32", "-o", "plan.json")
STAGES = ("--gpus", "2xCPU", "--dp", "1", "--tp", "1", "--cp", "1", "--pp", "2", "--micro-batch", "1", "--vpp", "2")
TWINS, SMALL = TEST_MODELS / "twins.py", TEST_MODELS / "small.py"
EXAMPLES = ROOT / "examples/scripts/own_loss.py"
PASSED = "passed: losses differ by at most"


def verified(folder: Path, *arguments: str) -> str:
    """Plan a model, and return the last line of `verify`."""
    passes(plan(folder, *arguments), "wrote plan.json")
    return passes(megaloom(folder, "verify", "plan.json"), PASSED)


@finding("parity P1", "A microbatch group that leaves a remainder trains on wrong gradients", Verdict.MENDED)
def remainder(folder: Path) -> str:
    groups = ("--recompute", "none", "--microbatch-group", "4", "--batch", "6")
    return verified(folder, f"{SMALL}:deep_llama", *STAGES, *groups, *LOAD)


@finding("parity P2", "A sum over a padded vocabulary counts the padding where tp is 1", Verdict.MENDED)
def padding(folder: Path) -> str:
    verified(folder, f"{EXAMPLES}:with_label_smoothing", "--gpus", "1xCPU", "--batch", "4", *LOAD)
    return verified(folder, f"{TWINS}:soft_lookup", "--gpus", "1xCPU", "--batch", "4", *LOAD)


@finding("parity P4", "Saving crashes if two embeddings of one rank share a table", Verdict.MENDED)
def shared_table(folder: Path) -> str:
    passes(plan(folder, f"{SMALL}:uneven_t5", *STAGES, "--batch", "4", *LOAD), "wrote plan.json")
    (folder / "text.txt").write_text("Each token is one byte of this text. " * 200)
    run = ("train", "plan.json", "--data", "text.txt", "--out", "run")
    passes(megaloom(folder, *run, "--steps", "1"), "step")
    return passes(megaloom(folder, *run, "--steps", "2"), "step")


@finding("parity P5", "Models with several kinds of experts, some corrected, crash in the first step", Verdict.MENDED)
def kinds_of_experts(folder: Path) -> str:
    verified(folder, f"{TWINS}:two_mixtures", "--gpus", "2xCPU", "--batch", "4", *LOAD)
    return verified(folder, f"{TWINS}:corrected_sizes", "--gpus", "2xCPU", "--batch", "4", *LOAD)


@finding("parity P6", "A sum in fp32, then a product with a weight in bf16, crashes", Verdict.MENDED)
def sum_then_product(folder: Path) -> str:
    load = ("--gpus", "1xCPU", "--seq", "32", "--batch", "4", "--precision", "bf16", "-o", "plan.json")
    return verified(folder, f"{TWINS}:pooled_gate", *load)


@finding("spotcheck N5b", 'LogSumExp("seq") is planned and never runs', Verdict.MENDED)
def log_sum_exp_of_a_sequence(folder: Path) -> str:
    verified(folder, f"{TWINS}:soft_maximum", "--gpus", "1xCPU", "--batch", "4", *LOAD)
    return verified(folder, f"{TWINS}:soft_maximum", "--gpus", "2xCPU", "--cp", "2", "--batch", "4", *LOAD)
