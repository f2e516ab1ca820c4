"""Changes of text, indexed datasets and tokenizers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

from tests.support.fuzz.case import ODD, Drawn, Label, changed, damaged_text, of_another_type, places, shown

LEGAL, ILLEGAL, EITHER = Label.LEGAL, Label.ILLEGAL, Label.EITHER
LINES: list[tuple[str | bytes, str, Label]] = [
    ('{"text": "fine"}', "a good line", LEGAL),
    ('{"text": "\\u00e9 \\ud83d\\ude00"}', "escapes", LEGAL),
    ('{"id": 3, "text": "more fields"}', "more fields", LEGAL),
    ("", "an empty line", LEGAL),
    ('{"text": "' + "x" * 100_000 + '"}', "a long line", LEGAL),
    ('{"text": "\\ud800"}', "a lone surrogate", EITHER),
    ('{"text": ""}', "an empty text", EITHER),
    ('{"text": "\\u0000"}', "a null character", EITHER),
    ('{"text": 3}', "a number for the text", ILLEGAL),
    ('{"text": null}', "null for the text", ILLEGAL),
    ('{"text": ["x"]}', "a list for the text", ILLEGAL),
    ('{"txet": "x"}', "a misspelt field", ILLEGAL),
    ("{}", "no field", ILLEGAL),
    ("[]", "a list", ILLEGAL),
    ("null", "null", ILLEGAL),
    ("3", "a number", ILLEGAL),
    ('"x"', "a text", ILLEGAL),
    ('{"text": "x"', "cut", ILLEGAL),
    ("{'text': 'x'}", "Python's quotes", ILLEGAL),
    ("[" * 100_000, "nested", ILLEGAL),
    ('{"text": "x", "more": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested in a field", ILLEGAL),
    (b'{"text": "\xff\xfe"}', "no UTF-8", ILLEGAL),
    ('{"text": "x"} {"text": "y"}', "two on one line", ILLEGAL),
    ("\0", "a null byte", ILLEGAL),
]


def data(draw: Random, folder: Path, bases: Path) -> Drawn:
    """Change text, a dataset or a tokenizer, and tokenize or train on it."""
    return draw.choice([_jsonl, _jsonl, _tokenizer, _dataset, _description])(draw, folder, bases)


def _jsonl(draw: Random, folder: Path, bases: Path) -> Drawn:
    lines: list[str | bytes] = list((bases / "text.jsonl").read_text().splitlines())
    new, what, label = draw.choice(LINES)
    lines.insert(draw.randrange(len(lines)), new)
    encoded = [line if isinstance(line, bytes) else line.encode("utf-8", "surrogatepass") for line in lines]
    (folder / "d.jsonl").write_bytes(b"\n".join(encoded) + draw.choice([b"\n", b""]))
    tokenizer = draw.choice([("--tokenizer", "bytes"), ("--train-vocab", "280"), ("--tokenizer", "t")])
    shutil.copytree(bases / "ds-tokenizer", folder / "t")
    return Drawn(("data", "d.jsonl", "-o", "out", *tokenizer), label, f"{what}, {' '.join(tokenizer)}")


def _tokenizer(draw: Random, folder: Path, bases: Path) -> Drawn:
    shutil.copytree(bases / "ds-tokenizer", folder / "t")
    shutil.copy(bases / "text.jsonl", folder / "d.jsonl")
    path = draw.choice(sorted((folder / "t").glob("*.json")))
    raw = json.loads(path.read_text())
    if draw.random() < 0.4:
        damaged, what = damaged_text(draw, path.read_text())
        label = ILLEGAL if path.name == "tokenizer.json" else EITHER
        path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode("utf-8", "surrogatepass"))
    else:
        at, value = draw.choice(list(places(raw))[:400])
        new = of_another_type(draw, value)
        changed(raw, at, new)
        path.write_text(json.dumps(raw))
        what, label = f"{shown(at)} = {new!r:.40}", EITHER
    return Drawn(("data", "d.jsonl", "-o", "out", "--tokenizer", "t"), label, f"{path.name}: {what}")


def _copied_dataset(folder: Path, bases: Path) -> None:
    for path in bases.glob("ds*"):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)  # type: ignore[operator]


SIZES = ("--set", "layers=1", "--set", "heads=2", "--set", "embed=32", "--set", "vocab=300")
TRAIN = ("train", "stdlib-gpt", *SIZES, "--data", "ds", "--devices", "1", "--seq", "16", "--batch", "2")
ONCE = ("--steps", "1", "--evaluate-batches", "1", "--out", "new")


def _dataset(draw: Random, folder: Path, bases: Path) -> Drawn:
    _copied_dataset(folder, bases)
    name = draw.choice(["ds.idx", "ds.idx", "ds.bin"])
    path = folder / name
    raw = bytearray(path.read_bytes())
    way = draw.randrange(5)
    if way == 0:
        del raw[draw.randrange(len(raw)) :]
        what, label = f"cut to {len(raw)} bytes", ILLEGAL
    elif way == 1:
        raw += b"\0" * draw.randrange(1, 100)
        what, label = "longer", EITHER if name == "ds.idx" else ILLEGAL  # Megatron-LM reads no further
    elif way == 2:
        path.unlink()
        return Drawn((*TRAIN, *ONCE), ILLEGAL, f"{name}: missing")
    elif way == 3:
        raw[:] = b""
        what, label = "empty", ILLEGAL
    else:
        at = draw.randrange(min(len(raw), 34 if name == "ds.idx" else len(raw)))
        raw[at] ^= 1 << draw.randrange(8)
        what, label = f"a bit of byte {at}", EITHER
    path.write_bytes(raw)
    return Drawn((*TRAIN, *ONCE), label, f"{name}: {what}")


def _description(draw: Random, folder: Path, bases: Path) -> Drawn:
    _copied_dataset(folder, bases)
    path = folder / "ds.json"
    raw = json.loads(path.read_text())
    if draw.random() < 0.3:
        damaged, what = damaged_text(draw, path.read_text())
        path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode("utf-8", "surrogatepass"))
        return Drawn((*TRAIN, *ONCE), ILLEGAL, f"ds.json: {what}")
    at, value = draw.choice(list(places(raw)))
    new = draw.choice([odd for odd in ODD if odd != value])
    changed(raw, at, new)
    path.write_text(json.dumps(raw))
    return Drawn((*TRAIN, *ONCE), EITHER, f"ds.json: {shown(at)} = {new!r:.40}")
