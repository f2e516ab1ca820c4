"""Damaged and odd inputs, sealing of saved files, and names inside of scripts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.findings.finding import Verdict, finding, megaloom, passes, plan

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
    name = "x\ntouch PWNED\n#"
    (folder / name).mkdir()
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_layer": 2}
    sizes = {"n_positions": 64, "vocab_size": 256, "activation_function": "gelu_new"}
    (folder / name / "config.json").write_text(json.dumps(config | sizes))
    passes(plan(folder, name, *SMALL[1:], "-o", "plan.json"))
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
