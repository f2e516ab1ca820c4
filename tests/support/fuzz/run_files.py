"""Damaged files of runs for `plan --from`, and logs for `calibrate`: bytes, words and lines are changed."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from random import Random

from tests.support.fuzz.case import Drawn, Label
from tests.support.fuzz.json_files import written
from tests.support.run_files import FOLDER, MODEL_FLAGS, RUN_FILES, VOCABULARY

ODD_WORDS = (
    *("0", "-1", "1e999", "nan", "9" * 30, "''", "$((1/0))", "$(touch PWNED)", "${X:?}", "`id`", "\x1b[31m", "∞"),
    *("true", "None", "[", "{", "x" * 5000, "--tensor-model-parallel-size", "&& false", "|| exit 1", "<<EOF", "\\"),
)
ODD_OPTIONS = (
    (),
    ("--measured", "1.5s"),
    ("--measured", "-3"),
    ("--patch", "p.patch"),
    ("--html", "o.html"),
    ("--json",),
    ("--command", "2"),
    ("--command", "nothing"),
    ("--tokens", "1B"),
    ("--tokens", "1B", "--price", "2.5"),
    ("--version-of", "0.12.0"),
    ("--version-of", "99"),
    ("--env", "TP=4"),
    ("--ignore-flag", "unknown"),
    ("--set", "seq-length=0"),
)


def run_file(draw: Random, folder: Path, bases: Path) -> Drawn:
    """Change a file of a run, and read it with some options."""
    name = draw.choice(RUN_FILES)
    text, what = _changed((FOLDER / name).read_text(), draw)
    written(folder / name, text)
    gpus = "H100" if name.endswith(".slurm") else "8xH100"
    if name.endswith(".log") and draw.random() < 0.5:
        shutil.copy(FOLDER / name, folder / "other.log")
        words = ("calibrate", name, "other.log", "--gpus", gpus, "-o", "ours.toml")
        return Drawn(words, Label.EITHER, f"{name} for calibrate: {what}")
    options = [word for one in draw.sample(ODD_OPTIONS, 2) for word in one]
    options += [word for flag in MODEL_FLAGS.get(name, "").split() for word in ("--set", flag)]
    if name in VOCABULARY:
        options += ["--vocab", str(VOCABULARY[name])]
    return Drawn(("plan", "--from", name, "--gpus", gpus, *options), Label.EITHER, f"{name}, {options}: {what}")


def _changed(text: str, draw: Random) -> tuple[str | bytes, str]:
    """Return a text with one to three changes of words or lines, or with damaged bytes."""
    if draw.random() < 0.1:
        cut = draw.randrange(len(text))
        return draw.choice([text.encode()[:cut] + b"\xff\x00\xfe", text.encode("utf-16"), b"", b"\0" * 100]), "bytes"
    told = []
    for _ in range(draw.randint(1, 3)):
        change = draw.choice([_word, _word, _word, _line, _cut])
        text, what = change(text, draw)
        told.append(what)
    return text, "; ".join(told)


def _word(text: str, draw: Random) -> tuple[str, str]:
    """Replace a word between white space, quotes, equals signs or brackets."""
    marks = " \n\"'=()[]{},:"
    ends = [i for i, mark in enumerate(text) if mark in marks]
    starts = [(a + 1, b) for a, b in pairwise(ends) if b > a + 1]
    if not starts:
        return text, "nothing"
    start, end = draw.choice(starts)
    odd = draw.choice(ODD_WORDS)
    return text[:start] + odd + text[end:], f"{text[start:end][:30]!r} is {odd[:30]!r}"


def _line(text: str, draw: Random) -> tuple[str, str]:
    """Leave a line out, or repeat it elsewhere."""
    lines = text.splitlines(keepends=True)
    if not lines:
        return text, "nothing"
    number = draw.randrange(len(lines))
    if draw.random() < 0.5:
        return "".join(lines[:number] + lines[number + 1 :]), f"without line {number + 1}"
    at = draw.randrange(len(lines) + 1)
    return "".join([*lines[:at], lines[number], *lines[at:]]), f"line {number + 1} again at {at + 1}"


def _cut(text: str, draw: Random) -> tuple[str, str]:
    """End a text early."""
    cut = draw.randrange(len(text) + 1)
    return text[:cut], f"cut after {cut} characters"
