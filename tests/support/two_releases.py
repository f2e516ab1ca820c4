"""Runs under two releases of megatron-core: equal losses from equal seeds, and each continues what the other has saved.

`python -m tests.support.two_releases .venv/bin .venv-newest/bin`: the programs of two environments.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from attrs import frozen

from tests.support.paths import TEST_MODELS

STEPS = 6
TOLERANCE = 1e-6
SMALL = TEST_MODELS / "small.py"
CASES = {
    "stdlib-gpt, DP2, optimizer sharded": ("stdlib-gpt", "--dp", "2", "--distributed-optimizer"),
    "experts, EP2 PP2": (f"{SMALL}:tiny_llama4", "--dp", "2", "--ep", "2", "--pp", "2"),
    "a llama, TP2 SP PP2 VPP2": (f"{SMALL}:deep_llama", "--tp", "2", "--sequence-parallel", "--pp", "2", "--vpp", "2"),
}
COMMON = ("--seq", "64", "--batch", "8", "--decay-steps", str(STEPS), "--warmup", "1", "--data", "synthetic")
RELEASE = "from importlib.metadata import version as v; print('megatron-core', v('megatron-core'), 'torch', v('torch'))"


@frozen
class Environment:
    """An environment with Megaloom, and the versions in it."""

    programs: Path
    versions: str

    def train(self, run: Path, steps: int, *options: str) -> None:
        """Train up to a step, from the last checkpoint if the run has one."""
        command = [self.programs / "megaloom", "train", *options, "--steps", str(steps), "--out", run]
        environment = {**os.environ, "MEGALOOM_MACHINE": "4xCPU", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr}")


def environment(programs: Path) -> Environment:
    """Return the environment of a folder with `python` and `megaloom`."""
    done = subprocess.run([programs / "python", "-c", RELEASE], capture_output=True, text=True, check=True, timeout=60)
    return Environment(programs, done.stdout.strip())


def losses(run: Path) -> list[float]:
    """Return the loss of each step of a run."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if line["event"] == "step"]


def difference(case: tuple[str, ...], folder: Path, one: Environment, other: Environment) -> float:
    """Return the largest difference between losses: of whole runs, and of runs that the other environment continues."""
    for first, second, name in ((one, one, "one"), (other, other, "other"), (one, other, "ab"), (other, one, "ba")):
        first.train(folder / name, STEPS // 2, *case)
        second.train(folder / name, STEPS, *case)
    curves = [losses(folder / name) for name in ("one", "other", "ab", "ba")]
    if any(len(curve) != STEPS for curve in curves):
        raise RuntimeError(f"runs have losses of {[len(curve) for curve in curves]} steps, not {STEPS} each")
    return max(abs(loss - expected) for curve in curves for loss, expected in zip(curve, curves[0], strict=True))


def main() -> int:
    """Compare all cases, print a line for each, and return the exit code."""
    one, other = (environment(Path(programs).absolute()) for programs in sys.argv[1:])
    print(f"{one.versions} and {other.versions}: losses of {STEPS} steps, whole and continued by the other")
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, case) in enumerate(CASES.items()):
            found = difference((*case, *COMMON), Path(folder) / str(i), one, other)
            print(f"{name:<40} largest difference {found:.1e}", flush=True)
            worst = max(worst, found)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
