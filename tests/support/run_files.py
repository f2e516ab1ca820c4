"""Small run files of ours in the styles of public launchers, one for each reader, and what is read of them."""

from __future__ import annotations

from pathlib import Path

from megaloom.dsl.errors import UserError
from megaloom.dsl.facts.parameters import params
from megaloom.planner.runs.megatron.read import Hints
from megaloom.planner.runs.read import RunInputs, read_text
from megaloom.planner.runs.words import Origin, Word
from tests.support.paths import TESTS

FOLDER = TESTS / "data" / "run_files"
RUN_FILES = tuple(sorted(path.name for path in FOLDER.iterdir()))
GPUS = 8  # where a file does not state them; the Slurm script has 16
VOCABULARY = {"nemo1.yaml": 32_000}  # where a tokenizer has it
MODEL_FLAGS = {
    "accelerate.yaml": (
        "num-layers=8 hidden-size=512 num-attention-heads=8 seq-length=1024 micro-batch-size=2 vocab-size=32000"
    )
}
"""Flags of models that a file does not state, as they are given to `--set`."""


def inputs_of(name: str) -> RunInputs:
    """Return what is given beside a file."""
    flags = MODEL_FLAGS.get(name, "").split()
    return RunInputs(
        devices=None if name.endswith(".slurm") else GPUS,
        hints=Hints(vocab=VOCABULARY.get(name)),
        flags=tuple(Word(f"--{flag}", Origin("--set", n)) for n, flag in enumerate(flags, 1)),
    )


def what_is_read(name: str, folder: Path = FOLDER) -> str:
    """Return all facts of a file as text with their lines, or the message with which it is refused."""
    try:
        run = read_text((folder / name).read_text(), name, inputs_of(name))
    except UserError as error:
        return f"{name}\n  refused: {error}\n"
    lines = [name, f"  {run.program} {run.version or run.defaults}, {run.devices.count} GPUs, {run.layout}"]
    lines += [f"  {run.workload}, {params(run.model):,} parameters, {len(run.stages)} stages, {run.profile.name}"]
    for fact in run.stated:
        lines.append(f"  {fact.group} {fact.name}: {fact.value}{f' [{fact.origin}]' if fact.origin else ''}")
    lines += [f"  assumed: {note.text}" for note in run.assumed] + [f"  left out: {note.text}" for note in run.notes]
    if run.measured is not None:
        lines.append(
            f"  measured: {run.measured.seconds:.3f} s, {run.measured.nbytes} bytes, {run.measured.reserved} held"
        )
    return "\n".join(lines) + "\n"
