"""Findings in checkpoints: names of their tensors, what a resumed run says, and damaged files."""

from __future__ import annotations

from pathlib import Path

from tests.support.checkpoints import damage
from tests.support.findings.finding import Verdict, finding, megaloom, passes, plan, refuses
from tests.support.paths import TEST_MODELS

SMALL = TEST_MODELS / "small.py"
TEXT = "Each token is one byte of this text. " * 200
LOAD = ("--seq", "32", "--batch", "4", "--precision", "fp32")


def trained(folder: Path, *arguments: str) -> None:
    """Train a tiny model for four steps in the folder `run`, saved after the second and the fourth."""
    (folder / "text.txt").write_text(TEXT)
    work = ("--devices", "1", *LOAD, "--data", "text.txt", "--steps", "4", "--save-every", "2", "--out", "run")
    passes(megaloom(folder, "train", f"{SMALL}:byte_llama", *work, *arguments), "step")


@finding("parity P3", "Checkpoints of ViT, LLaVA and GPT-OSS do not load under other layouts", Verdict.MENDED)
def other_layouts(folder: Path) -> str:
    (folder / "text.txt").write_text(TEXT)
    for name, axes in (("module", ("--ep", "2", "--etp", "1")), ("body", ("--ep", "1", "--etp", "2"))):
        wanted = (f"{SMALL}:biased_experts", "--gpus", "2xCPU", "--dp", "2", *axes, *LOAD)
        passes(plan(folder, *wanted, "-o", f"{name}.json"), "wrote")
    run = ("--data", "text.txt", "--out", "run")
    passes(megaloom(folder, "train", "module.json", "--steps", "1", *run), "step")
    return passes(megaloom(folder, "train", "body.json", "--steps", "2", *run), "resumed from step 1 of 2")


@finding("users 5", "A resumed run does not say that seq, batch or precision changed", Verdict.MENDED)
def workload(folder: Path) -> str:
    trained(folder)
    again = ("--devices", "1", "--seq", "16", "--batch", "8", "--precision", "bf16", "--data", "text.txt")
    ended = megaloom(folder, "train", f"{SMALL}:byte_llama", *again, "--steps", "5", "--out", "run")
    passes(ended, "batch: was 4, is now 8", "precision: was fp32, is now bf16")
    return passes(ended, "seq: was 32, is now 16: the order of the text starts anew")


@finding("users 11", "Where all checkpoints are damaged, the advice names a damaged one", Verdict.MENDED)
def all_damaged(folder: Path) -> str:
    trained(folder)
    for path in (folder / "run").glob("step-*/__0_0.distcp"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    ended = megaloom(folder, "train", "run", "--steps", "5")
    refuses(ended, "step-000004 is damaged")
    return refuses(ended, "no other checkpoint of this run is undamaged")


@finding("fuzz D19b", "A refused continuation changes the options in run.json", Verdict.MENDED)
def options_kept(folder: Path) -> str:
    trained(folder)
    damage(folder / "run" / "step-000004")
    before = (folder / "run" / "run.json").read_bytes()
    seen = refuses(megaloom(folder, "train", "run", "--steps", "9"), "remove that folder to continue from step-000002")
    assert (folder / "run" / "run.json").read_bytes() == before
    return seen


@finding("fuzz D21", "A checkpoint with damaged contents and corrected checksums ends in a traceback", Verdict.MENDED)
def damaged_contents(folder: Path) -> str:
    trained(folder)
    for step in ("step-000002", "step-000004"):
        damage(folder / "run" / step)
    refuses(megaloom(folder, "generate", "run", "--prompt", "a", "--max-new-tokens", "4"), "is damaged")
    refuses(megaloom(folder, "evaluate", "run", "--data", "text.txt"), "is damaged")
    return refuses(megaloom(folder, "train", "run", "--steps", "9"), "step-000004 is damaged")


@finding("spotcheck N9h", 'open_folder("x") ends in an AttributeError', Verdict.MENDED)
def folder_by_name(folder: Path) -> str:
    from megaloom.dsl.errors import UserError
    from megaloom.runtime.weights.hugging_face_weights import open_folder

    try:
        open_folder(str(folder / "x"))
    except UserError as refusal:
        return str(refusal).splitlines()[0]
    raise AssertionError("a folder that is not there was opened")
