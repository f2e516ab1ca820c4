"""Run the same checks under one or more releases of megatron-core on the GPU at hand, for their results side by side.

    python -m benchmarks.releases                                   # the installed release
    python -m benchmarks.releases .gpu/lib16 .gpu/mcore19           # two, each from a folder with its unzipped wheel
    python -m benchmarks.releases --only steps .gpu/lib16 .gpu/mcore19 .gpu/lib16    # again, to see the noise

A folder comes first on the path of its runs. The parts are: `families` (ten families against the oracle on CPU, with
recompute), `tuning` (a small run, its weights in a Hugging Face folder, adapters trained on these, and text from them),
and `steps` (median step times of a few models). The exit code is 1 if any check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

VERSION = "from megatron.core import package_info as p; print(p.MAJOR, p.MINOR, p.PATCH, sep='.')"
MODELS = ("small", "llama3-1b", "llama_8b", "mixtral_8x7b", "qwen3_30b", "deepseek_v3")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,  # bytes, and the end of a document
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
Modules = Callable[..., bool]
"""Runs a module of this Python with arguments, and returns whether it succeeded."""


def environment(folder: str) -> dict[str, str]:
    """Return this environment with a folder first on Python's path."""
    path = os.pathsep.join(filter(None, (folder and str(Path(folder).resolve()), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "NO_VCS_VERSION": "1"}


def run_module(folder: str, module: str, *arguments: str) -> bool:
    """Run a module with a folder first on its path. Print its output, and return whether it succeeded."""
    return subprocess.run([sys.executable, "-m", module, *arguments], env=environment(folder)).returncode == 0


def families(run: Modules) -> bool:
    """Compare ten families with the oracle."""
    return run("tests.support.parity.gpu_table", "--layouts", "recompute")


def tuning(run: Modules) -> bool:
    """Train, fine-tune adapters from the trained weights, and generate."""
    with tempfile.TemporaryDirectory() as name:
        config, first, weights, tuned = (
            str(Path(name) / part) for part in ("config.json", "first", "weights", "tuned")
        )
        Path(config).write_text(json.dumps(CONFIG), encoding="utf-8")
        cli = "megaloom.runtime.cli"
        return (
            run(cli, "train", config, "--steps", "30", "--out", first)
            and run(cli, "convert", first, "--to", "hf", "-o", weights)
            and run(cli, "train", "--from", weights, "--lora-rank", "4", "--steps", "10", "--out", tuned)
            and run(cli, "generate", tuned, "--prompt", "import ", "--max-new-tokens", "40")
        )


def steps(run: Modules) -> bool:
    """Print the median step time of each model."""
    return run("benchmarks.steps", "1", *MODELS)


PARTS: dict[str, Callable[[Modules], bool]] = {"families": families, "tuning": tuning, "steps": steps}


def failures(folder: str, parts: Iterable[str]) -> list[str]:
    """Run parts under the release of a folder, and return the names of those that fail."""
    command = [sys.executable, "-W", "ignore", "-c", VERSION]
    release = subprocess.run(command, env=environment(folder), stdout=subprocess.PIPE, text=True, check=True)
    failed = []
    for part in parts:
        print(f"\n== megatron-core {release.stdout.strip()}, {part}", flush=True)
        begun = time.monotonic()
        succeeded = PARTS[part](lambda *command: run_module(folder, *command))
        print(f"== {'passed' if succeeded else 'FAILED'} in {time.monotonic() - begun:.0f} s", flush=True)
        if not succeeded:
            failed.append(part)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=[""])
    parser.add_argument("--only", action="append", choices=list(PARTS))
    options = parser.parse_args()
    failed = [part for folder in options.folders for part in failures(folder, options.only or PARTS)]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
