"""Damaged and odd inputs, sealing of saved files, and names inside of scripts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.findings.finding import Verdict, finding, megaloom, passes, plan, refuses
from tests.support.fuzz.model_files import GOOD, GOOD_WHOLE

SMALL = ("stdlib-gpt", "--gpus", "2xH100", "--seq", "64", "--batch", "4")


def small_plan(folder: Path, *more: str, change: Callable[[dict[str, Any]], None] = lambda raw: None) -> Path:
    """Write a plan with a change into a folder."""
    path = folder / "plan.json"
    passes(plan(folder, *SMALL, *more, "-o", str(path)))
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    return path


@finding("fuzz D6", "Exports put names into scripts unquoted", Verdict.MENDED)
def injection(folder: Path) -> str:
    name, broken = "x $(touch PWNED); touch PWNED #'", "x\ntouch PWNED\n#"
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_layer": 2}
    sizes = {"n_positions": 64, "vocab_size": 256, "activation_function": "gelu_new"}
    for each in (name, broken):
        (folder / each).mkdir()
        (folder / each / "config.json").write_text(json.dumps(config | sizes))
    refuses(plan(folder, broken, *SMALL[1:], "-o", "plan.json"), "a model cannot have the name")
    passes(plan(folder, name, *SMALL[1:], "-o", "plan.json"))
    raw = json.loads((folder / "plan.json").read_text())
    raw["cluster"]["source"] = broken
    (folder / "plan.json").write_text(json.dumps(raw))
    for command in ("torchrun", "srun", "scontrol"):
        (folder / command).write_text("#!/bin/sh\n")
        (folder / command).chmod(0o755)
    for target in ("slurm", "kubernetes", "skypilot"):
        passes(megaloom(folder, "export", "plan.json", "--to", target, "-o", f"{target}.sh"))
        assert "\ntouch PWNED" not in (folder / f"{target}.sh").read_text(), target
    run = subprocess.run(
        ["bash", "slurm.sh"],
        cwd=folder,
        env={"PATH": f"{folder}:/bin:/usr/bin", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n"},
        capture_output=True,
    )
    assert run.returncode == 0 and not (folder / "PWNED").exists()
    return "the name is one escaped comment and one safe word"


SIZES = ("--set", "layers=1", "--set", "heads=2", "--set", "embed=32")
ONCE = ("--devices", "1", "--seq", "16", "--batch", "2", "--evaluate-batches", "1", "--steps", "1")
PLANNED = ("--gpus", "2xH100", "--seq", "32", "--batch", "4")


def own_model(folder: Path, old: str, new: str) -> str:
    """Write the campaign's model file with a change, and return its name."""
    assert old in GOOD
    (folder / "m.py").write_text(GOOD.replace(old, new))
    return "m.py"


@finding("fuzz D4", "model.json is not sealed: evaluate and generate compute two models", Verdict.REFUSED)
def sealed(folder: Path) -> str:
    passes(megaloom(folder, "train", "stdlib-gpt", *SIZES, *ONCE, "--out", "run"))
    path = folder / "run" / "model.json"
    raw = json.loads(path.read_text())
    norms = [op for op in raw["ops"] if op.get("kind") == "Normalize"]
    norms[0]["fields"]["eps"] = 100
    path.write_text(json.dumps(raw, separators=(",", ":")))
    refuses(megaloom(folder, "evaluate", "run", "--data", "stdlib"), "was changed after it was written")
    return refuses(megaloom(folder, "generate", "run", "--prompt", "x"), "was changed after it was written")


@finding("fuzz D8", "Sizes beyond 63 bits end in tracebacks", Verdict.REFUSED)
def large_dims(folder: Path) -> str:
    name = own_model(folder, 'Dim("vocab", 128)', 'Dim("vocab", 10**30)')
    return refuses(plan(folder, name, *PLANNED), "must be at most 2,147,483,647")


@finding("fuzz D9", "No largest number of layers", Verdict.REFUSED)
def many_layers(folder: Path) -> str:
    return refuses(plan(folder, "stdlib-gpt", "--set", "layers=2147483648", seconds=120), "at most 2,000")


@finding("fuzz D11", "A value used twice doubles the work; deep programs overflow the stack", Verdict.MENDED)
def doubled(folder: Path) -> str:
    for name in ("value twice, 60 deep", "3,000 additions"):
        (folder / "m.py").write_text(GOOD_WHOLE[name])
        passes(megaloom(folder, "show", "m.py", seconds=200))
    return "shown"


@finding("fuzz D12", "Nested JSON is a traceback in four readers", Verdict.REFUSED)
def nested(folder: Path) -> str:
    (folder / "d.jsonl").write_text('{"text": "x", "more": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    return refuses(megaloom(folder, "data", "d.jsonl", "-o", "out", "--tokenizer", "bytes"), "nested too deeply")


@finding("fuzz D14", "An interval of [0, 1e-9] is a traceback", Verdict.REFUSED)
def interval(folder: Path) -> str:
    path = small_plan(folder, change=lambda raw: raw["predicted"].update(interval=[0, 1e-9]))
    return refuses(megaloom(folder, "explain", str(path)), "predicted.interval must be two times")


@finding("fuzz D15", "The prediction of a plan is not compared with its workload", Verdict.REFUSED)
def prediction(folder: Path) -> str:
    path = small_plan(folder, change=lambda raw: raw["workload"].update(seq=7))
    refuses(megaloom(folder, "explain", str(path)), "tokens_per_second_per_device must be")
    small_plan(folder, change=lambda raw: raw["predicted"].update(mfu=5.0))
    return refuses(megaloom(folder, "explain", str(path)), "at most 1")


@finding("fuzz D16", "Layers take values of wrong types", Verdict.REFUSED)
def types(folder: Path) -> str:
    name = own_model(folder, "causal=True", "causal='no'")
    return refuses(plan(folder, name, *PLANNED), "causal must be True or False")


@finding("fuzz D18", "Odd paths are tracebacks", Verdict.REFUSED)
def odd_paths(folder: Path) -> str:
    (folder / "loop").symlink_to("loop")
    refuses(megaloom(folder, "generate", "x" * 300, "--prompt", "x"))
    refuses(megaloom(folder, "pack", "."), "is not the folder of a run")
    return refuses(megaloom(folder, "pack", "loop"))


@finding("fuzz D19", "A refused command leaves files: --tensorboard-dir", Verdict.REFUSED)
def tensorboard(folder: Path) -> str:
    ended = megaloom(folder, "train", "stdlib-gpt", *SIZES, *ONCE, "--out", "run", "--tensorboard-dir", "/dev/null")
    assert not (folder / "run").exists()
    return refuses(ended, "cannot write into --tensorboard-dir")


@finding("fuzz D20", "An exception whose text fails is a traceback", Verdict.REFUSED)
def odd_errors(folder: Path) -> str:
    text = "class Odd(BaseException):\n    def __str__(self): raise KeyError\nraise Odd\n"
    (folder / "m.py").write_text(text)
    return refuses(plan(folder, "m.py"), "cannot load m.py: Odd")


@finding("fuzz D22", "Messages repeat long values and colour the terminal", Verdict.MENDED)
def long_messages(folder: Path) -> str:
    ended = plan(folder, "\x1b[31m" + "x" * 50_000)
    assert len(ended.text) < 3000 and "\x1b" not in ended.text
    return refuses(ended)


@finding("fuzz D23", "An endless file is read until memory ends", Verdict.REFUSED)
def endless(folder: Path) -> str:
    return refuses(megaloom(folder, "explain", "/dev/zero"), "it is a device, not a file")


@finding("newcomer A3", "A valid plan on one line is no plan", Verdict.MENDED)
def one_line(folder: Path) -> str:
    path = small_plan(folder, change=lambda raw: raw["workload"].update(seq=7))
    return refuses(megaloom(folder, "train", str(path)), "is damaged: predicted.tokens_per_second")


@finding("newcomer B4", "Places for output are tried after the search", Verdict.REFUSED)
def places(folder: Path) -> str:
    ended = plan(folder, *SMALL, "-o", "p.json", "--html", "no/x.html")
    assert not (folder / "p.json").exists()
    return refuses(ended, "cannot write --html")


@finding("newcomer B7", "A misspelt dim in splits is ignored", Verdict.REFUSED)
def splits(folder: Path) -> str:
    name = own_model(folder, 'splits = {"channels"', 'splits = {"chanels"')
    return refuses(plan(folder, name, *PLANNED), "did you mean channels?")


@finding("newcomer B9", "A model file cannot import its neighbour", Verdict.MENDED)
def neighbour(folder: Path) -> str:
    (folder / "inner").mkdir()
    (folder / "inner" / "beside.py").write_text("width = 96\n")
    (folder / "inner" / "m.py").write_text(GOOD_WHOLE["a neighbour"])
    return passes(megaloom(folder, "show", "inner/m.py"))


@finding("spotcheck N11", "A model file cannot import a file beside it", Verdict.MENDED)
def beside(folder: Path) -> str:
    return neighbour(folder)


@finding("fuzz D13", "metrics.jsonl with a value of another type is a traceback", Verdict.REFUSED)
def metrics(folder: Path) -> str:
    passes(megaloom(folder, "train", "stdlib-gpt", *SIZES, *ONCE, "--out", "run"))
    path = folder / "run" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss": ', '"loss": "abc", "other": ', 1))
    return refuses(megaloom(folder, "report", "run"), "line 1: loss is 'abc'")


@finding("spotcheck N9 folder", "A run that W&B refuses leaves its folder", Verdict.MENDED)
def refused_by_wandb(folder: Path) -> str:
    given = ("--wandb", "x", "--out", "runs/new")
    ended = megaloom(folder, "train", "stdlib-gpt", *SIZES, *ONCE, *given, HOME=str(folder / "home"), WANDB_API_KEY="")
    assert not (folder / "runs").exists(), sorted((folder / "runs").rglob("*"))
    return refuses(ended, "W&B refuses the run")


@finding("fuzz D19 lock", "A refused command leaves files: the lock of a run", Verdict.MENDED)
def lock(folder: Path) -> str:
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text("{}")
    ended = megaloom(folder, "train", "run")
    assert [path.name for path in (folder / "run").iterdir()] == ["run.json"]
    long = "/".join(["d" * 200] * 25)
    refuses(megaloom(folder, "train", "stdlib-gpt", *SIZES, *ONCE, "--data", long, "--out", "deep/new"))
    assert not (folder / "deep").exists()
    return refuses(ended)


@finding("fuzz D23 holes", "A file of 64 GiB without text is a traceback", Verdict.REFUSED)
def hole(folder: Path) -> str:
    with (folder / "hole.json").open("wb") as file:
        file.truncate(1 << 36)
    return refuses(
        megaloom(folder, "data", "hole.json", "-o", "out", "--tokenizer", "bytes"), "has more than 268,435,456"
    )
