"""Odd options, and odd paths for every place where a command takes one."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

from tests.support.fuzz.case import Drawn, Label

LEGAL, ILLEGAL, EITHER = Label.LEGAL, Label.ILLEGAL, Label.EITHER
MODELS = ("gpt2", "stdlib-gpt", "llama3-8b", "vit-base", "mamba2-130m", "bert-base", "mixtral-8x7b", "t5-small")
GPUS = ("8xH100", "1xH100", "8xV100", "16xA100", "4xCPU", "64xB200", "8xH200", "2xA100-40GB", "72xGB200", "1..4xH100")
NUMBERS = dict.fromkeys(
    ("whole",),
    (
        "--pp",
        "--tp",
        "--dp",
        "--cp",
        "--ep",
        "--etp",
        "--vpp",
        "--micro-batch",
        "--seq",
        "--batch",
        "--top",
        "--vocab-multiple",
        "--replicas",
    ),
)["whole"]
BAD_NUMBERS = (
    "0",
    "-1",
    "x",
    "",
    "1.5",
    "1e3",
    "nan",
    "inf",
    "10000000000000000000",
    "0x10",
    "--",
    "\x1b[31m",
    "٣x",
    "9" * 5000,
)
BAD_WORDS = {
    "--gpus": (
        "",
        "H1000",
        "0xH100",
        "-1xH100",
        "8x",
        "xH100",
        "8xH100x",
        "1e9xH100",
        "9" * 400 + "xH100",
        "8..1xH100",
        "\0x"[1:],
    ),
    "--precision": ("", "fp7", "BF16 ", "\x1b[31m", "x" * 10_000),
    "--recompute": ("", "half", "True"),
    "--runtime": ("", "torch"),
    "--memory-headroom": ("-1", "101%", "nan", "inf", "x", "", "1e400"),
    "--overlap": ("nothing", "", "gradients,weights,x"),
    "--shard": ("", "weight", "gradients,weights", "3", "\x1b[31m"),
    "--reshard": ("", "steps", "micro batch"),
    "--expert-shard": ("", "weight", "all", "optimizer,weights"),
    "--lora-rank": ("0", "-1", "x", "1.5"),
    "--unheard-of": ("x",),
}


def options(draw: Random, folder: Path, bases: Path) -> Drawn:
    """Plan with drawn options, some of which are wrong."""
    del folder, bases
    model, gpus = draw.choice(MODELS), draw.choice(GPUS)
    words = [
        "plan",
        model,
        "--gpus",
        gpus,
        "--seq",
        str(draw.choice([64, 128, 197, 512])),
        "--batch",
        str(draw.choice([8, 32, 96])),
    ]
    label, what = EITHER, f"{model} on {gpus}"
    for option in draw.sample(NUMBERS[:8], draw.randrange(4)):
        words += [option, str(draw.choice([1, 2, 2, 3, 4, 8]))]
    for flag in ("--distributed-optimizer", "--sequence-parallel", "--json", "--pareto", "--fastest"):
        words += [flag] * (draw.random() < 0.1)
    if draw.random() < 0.4:
        words += ["--shard", draw.choice(["none", "optimizer", "gradients", "weights", "weights"])]
        for option, values in (("--reshard", ["micro-batch", "step"]), ("--replicas", ["1", "2", "2", "3", "4"])):
            words += [option, draw.choice(values)] if draw.random() < 0.3 else []
    if draw.random() < 0.3:
        words += ["--expert-shard", draw.choice(["same", "none", "optimizer", "gradients", "weights"])]
    if draw.random() < 0.4:
        words += ["--precision", draw.choice(["fp32", "fp16", "bf16", "fp8"])]
    lint = draw.random() < 0.3
    if draw.random() < 0.6:
        option, bad = draw.choice(
            [(name, bad) for name in NUMBERS for bad in BAD_NUMBERS] + [(n, b) for n in BAD_WORDS for b in BAD_WORDS[n]]
        )
        while option in words:
            at = words.index(option)
            del words[at : at + 2]
        words += [option, bad]
        label, what = ILLEGAL, f"{what}, {option} {bad!r:.40}"
        if bad == "0x10":
            label = EITHER  # a whole number, as in Python
        if option == "--top" and bad.isdecimal() and bad.strip("0"):
            label = EITHER  # more plans than there are
        if option == "--top" and (lint or "--pareto" in words or ".." in gpus):
            label = EITHER
        if lint and option in ("--memory-headroom", "--runtime"):
            label = EITHER
    if lint:
        words = [word for word in words if word not in ("--pareto", "--json")] + ["--lint"]
    if not {"--json", "--pareto"} & set(words) and ".." not in gpus and not lint:
        words += ["-o", "p.json"]
    return Drawn(tuple(words), label, what)


def _places(bases: Path) -> dict[str, tuple[str, ...]]:
    """Return commands that read from a place, written as PLACE."""
    b = str(bases)
    return {
        "show": ("show", "PLACE"),
        "plan": ("plan", "PLACE", "-o", "p.json"),
        "plan --gpus": ("plan", "stdlib-gpt", "--gpus", "8xPLACE", "-o", "p.json"),
        "plan --settings": ("plan", "stdlib-gpt", "--settings", "PLACE", "-o", "p.json"),
        "explain": ("explain", "PLACE"),
        "explain OTHER": ("explain", f"{b}/plan.json", "PLACE"),
        "export": ("export", "PLACE", "--to", "slurm"),
        "train": ("train", "PLACE", "--steps", "1", "--out", "new"),
        "train --data": ("train", "stdlib-gpt", "--steps", "1", "--out", "new", "--data", "PLACE"),
        "train --from": ("train", "--from", "PLACE", "--steps", "1", "--out", "new"),
        "generate": ("generate", "PLACE", "--prompt", "x"),
        "generate --prompt-file": ("generate", f"{b}/run", "--prompt-file", "PLACE"),
        "evaluate": ("evaluate", "PLACE", "--data", f"{b}/text.jsonl"),
        "evaluate --data": ("evaluate", f"{b}/run", "--data", "PLACE"),
        "convert": ("convert", "PLACE", "--to", "hf", "-o", "hf"),
        "verify": ("verify", "PLACE", "--steps", "1"),
        "report": ("report", "PLACE", "-o", "r.html"),
        "compare": ("compare", "PLACE"),
        "compare TRACE": ("compare", f"{b}/plan.json", "PLACE"),
        "pack": ("pack", "PLACE"),
        "unpack": ("unpack", "PLACE", "-o", "out"),
        "data": ("data", "PLACE", "-o", "out", "--tokenizer", "bytes"),
        "data --tokenizer": ("data", f"{b}/text.jsonl", "-o", "out", "--tokenizer", "PLACE"),
    }


def _targets(bases: Path) -> dict[str, tuple[str, ...]]:
    """Return commands that write to a place, written as PLACE."""
    b = str(bases)
    small = ("plan", "stdlib-gpt", "--gpus", "2xH100", "--seq", "64", "--batch", "4")
    once = ("--data", f"{b}/ds", "--set", "layers=1", "--set", "embed=32", "--set", "heads=2", "--set", "vocab=300")
    train = ("train", "stdlib-gpt", *once, "--steps", "1", "--devices", "1", "--seq", "16", "--batch", "2")
    return {
        "plan -o": (*small, "-o", "PLACE"),
        "plan --html": (*small, "-o", "p.json", "--html", "PLACE"),
        "plan --trace": (*small, "-o", "p.json", "--trace", "PLACE"),
        "explain --html": ("explain", f"{b}/plan.json", "--html", "PLACE"),
        "export -o": ("export", f"{b}/plan.json", "--to", "slurm", "-o", "PLACE"),
        "train --out": (*train, "--out", "PLACE"),
        "train --tensorboard-dir": (*train, "--out", "new", "--tensorboard-dir", "PLACE"),
        "convert -o": ("convert", f"{b}/run", "--to", "hf", "-o", "PLACE"),
        "pack -o": ("pack", f"{b}/run", "-o", "PLACE"),
        "unpack -o": ("unpack", f"{b}/run.megaloom", "-o", "PLACE"),
        "report -o": ("report", f"{b}/run", "-o", "PLACE"),
        "data -o": ("data", f"{b}/text.jsonl", "-o", "PLACE", "--tokenizer", "bytes"),
        "show --html": ("show", "gpt2", "--html", "PLACE"),
    }


NOTHING = "x" * 300  # a name that no file system takes
READ = {
    "a missing file": ("nope.json", ILLEGAL),
    "a missing folder": ("nope/nope/nope", ILLEGAL),
    "a name too long": (NOTHING, ILLEGAL),
    "a path too long": ("/".join(["d" * 200] * 25), ILLEGAL),
    "a loop of links": ("loop", ILLEGAL),
    "a broken link": ("broken", ILLEGAL),
    "an empty folder": ("empty", ILLEGAL),
    "an empty file": ("empty.json", ILLEGAL),
    "no name": ("", ILLEGAL),
    "the folder itself": (".", EITHER),
    "its parent": ("..", EITHER),
    "/dev/zero": ("/dev/zero", ILLEGAL),
    "/dev/full": ("/dev/full", ILLEGAL),
    "/dev/null": ("/dev/null", ILLEGAL),
    "a file of /proc": ("/proc/self/mem", ILLEGAL),
    "a folder of /proc": ("/proc/self/fd", EITHER),
    "below a file": ("empty.json/x", ILLEGAL),
    "a line break": ("a\nb.json", ILLEGAL),
    "an escape": ("\x1b[31m.json", ILLEGAL),
    "no UTF-8": ("\udcff.json", ILLEGAL),
    "a dash": ("--", EITHER),
    "binary": ("binary.json", ILLEGAL),
    "binary Python": ("binary.py", ILLEGAL),
    "a home": ("~/nope.json", ILLEGAL),
    "dots": ("a/../nope.json", ILLEGAL),
    "a large hole": ("hole.json", ILLEGAL),
}
WRITE = {
    "a missing folder": ("nope/nope/x", EITHER),
    "a name too long": (NOTHING, ILLEGAL),
    "a path too long": ("/".join(["d" * 200] * 25), ILLEGAL),
    "a loop of links": ("loop", ILLEGAL),
    "no name": ("", ILLEGAL),
    "below a file": ("empty.json/x", ILLEGAL),
    "/proc": ("/proc/x/y", ILLEGAL),
    "/proc/self/x": ("/proc/self/x", ILLEGAL),
    "an empty folder": ("empty", EITHER),
    "a full device below": ("/dev/full/x", ILLEGAL),
    "a device": ("/dev/full", ILLEGAL),
    "a good name": ("good", LEGAL),
    "a name with a space": ("a b", LEGAL),
    "a line break": ("a\nb", EITHER),
    "a dash": ("-x", EITHER),
    "the folder itself": (".", EITHER),
    "/sys": ("/sys/x", ILLEGAL),
    "a file that is there": ("empty.json", EITHER),
}


def paths(draw: Random, folder: Path, bases: Path) -> Drawn:
    """Give a command an odd place to read from or to write to."""
    (folder / "empty").mkdir()
    (folder / "empty.json").touch()
    (folder / "loop").symlink_to("loop")
    (folder / "broken").symlink_to("nowhere")
    for name in ("binary.json", "binary.py"):
        (folder / name).write_bytes(Random(0).randbytes(5000))
    with (folder / "hole.json").open("wb") as hole:
        os.truncate(hole.fileno(), 1 << 36)
    if draw.random() < 0.6:
        command, words = draw.choice(list(_places(bases).items()))
        what = draw.choice(list(READ))
        place, label = READ[what]
        if command == "plan --settings" and what in ("an empty file", "/dev/null"):
            label = EITHER
        if command == "generate --prompt-file" and what in ("an empty file", "/dev/null", "a file of /proc"):
            label = EITHER
    else:
        command, words = draw.choice(list(_targets(bases).items()))
        what = draw.choice(list(WRITE))
        place, label = WRITE[what]
        if command == "data -o" and what == "a loop of links":
            label = LEGAL  # -o is a prefix: the link itself is not touched
        if command == "convert -o" and label is LEGAL:
            label = ILLEGAL  # --to hf needs a config.json, which the run of a declared model does not have
    return Drawn(tuple(w.replace("PLACE", place) for w in words), label, f"{command}: {what}")
