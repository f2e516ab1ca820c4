"""Changes of run folders and packed runs: model, plan, options, metrics, checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

from tests.support.fuzz.case import ODD, Drawn, Label, changed, damaged_text, of_another_type, places, removed, shown

LEGAL, ILLEGAL, EITHER = Label.LEGAL, Label.ILLEGAL, Label.EITHER
GENERATE = ("generate", "run", "--prompt", "the quick", "--max-tokens", "2")
EVALUATE = ("evaluate", "run", "--data", "text.jsonl", "--part", "test")
READERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "model.json": (
        GENERATE,
        ("show", "run"),
        ("pack", "run", "-o", "x.megaloom"),
        ("convert", "run", "--to", "hf", "-o", "hf"),
    ),
    "plan.json": (GENERATE, ("pack", "run", "-o", "x.megaloom"), ("explain", "run/plan.json")),
    "run.json": (("train", "run"), GENERATE, ("pack", "run", "-o", "x.megaloom")),
    "metrics.jsonl": (("report", "run", "-o", "r.html"),),
    "checkpoint.json": (GENERATE, ("train", "run"), ("convert", "run", "--to", "hf", "-o", "hf")),
}


def run(draw: Random, folder: Path, bases: Path) -> Drawn:
    """Change a run folder or a packed run, and read it."""
    if draw.random() < 0.15:
        return _packed(draw, folder, bases)
    shutil.copytree(bases / "run", folder / "run")
    shutil.copy(bases / "text.jsonl", folder / "text.jsonl")
    for path in bases.glob("ds*"):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)  # type: ignore[operator]
    if draw.random() < 0.2:
        return _checkpoint_bytes(draw, folder)
    name = draw.choice(list(READERS))
    path = next((folder / "run").rglob(name))
    words = draw.choice(READERS[name])
    text = path.read_text()
    if draw.random() < 0.25:
        damaged, what = damaged_text(draw, text)
        path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode("utf-8", "surrogatepass"))
        lenient = name in ("metrics.jsonl", "checkpoint.json", "run.json")
        return Drawn(words, EITHER if lenient else ILLEGAL, f"{words[0]}, {name}: {what}")
    what, label = _field(draw, name, path, text)
    return Drawn(words, label, f"{words[0]}, {name}: {what}")


def _field(draw: Random, name: str, path: Path, text: str) -> tuple[str, Label]:
    """Change one field of a file of JSON, or of a line of one."""
    lines = text.splitlines() if name.endswith("jsonl") else [text]
    number = draw.randrange(len(lines))
    raw = json.loads(lines[number])
    at, value = draw.choice(list(places(raw)))
    if draw.random() < 0.2:
        removed(raw, at)
        what = f"without {shown(at)}"
    else:
        new = draw.choice(
            [odd for odd in ODD if odd != value] if draw.random() < 0.5 else [of_another_type(draw, value)]
        )
        changed(raw, at, new)
        what = f"{shown(at)} = {new!r:.40}"
    lines[number] = json.dumps(raw)
    path.write_text("\n".join(lines) + "\n")
    same = json.loads(text) == raw if name == "model.json" else True
    return what, EITHER if same else ILLEGAL


def _checkpoint_bytes(draw: Random, folder: Path) -> Drawn:
    """Damage a file of the newest checkpoint: an older one may be read instead, with a word."""
    files = sorted(p for p in (folder / "run").rglob("step-*/*") if p.is_file())
    path = draw.choice(files)
    raw = bytearray(path.read_bytes())
    if draw.random() < 0.3:
        path.unlink()
        what = "missing"
    elif draw.random() < 0.5:
        del raw[draw.randrange(len(raw)) :]
        path.write_bytes(raw)
        what = f"cut to {len(raw)}"
    else:
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        path.write_bytes(raw)
        what = "a bit"
    words = draw.choice([GENERATE, ("convert", "run", "--to", "hf", "-o", "hf"), ("pack", "run", "-o", "x.megaloom")])
    return Drawn(words, EITHER, f"{words[0]}, {path.name}: {what}")


def _packed(draw: Random, folder: Path, bases: Path) -> Drawn:
    raw = bytearray((bases / "run.megaloom").read_bytes())
    way = draw.randrange(4)
    label, what = EITHER, "a bit"
    if way == 0:
        del raw[draw.randrange(len(raw)) :]
        label, what = ILLEGAL, f"cut to {len(raw)} bytes"
    elif way == 1:
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    elif way == 2:
        raw = bytearray(draw.randbytes(draw.randrange(2000)))
        label, what = ILLEGAL, "random bytes"
    else:
        label, what = LEGAL, "nothing"
    (folder / "x.megaloom").write_bytes(raw)
    return Drawn(("unpack", "x.megaloom", "-o", "out"), label, f"unpack: {what}")
