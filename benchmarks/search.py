"""Time of searches: `python benchmarks/search.py`, seconds of processor time on one core, imports included.

scored: the lower bounds of step time and memory of every legal layout of GPT-3 175B on 1,024 H100.
plans: the `plan` command from start to end in a new process, the faster of two runs; and the wall-clock time until it
shows a first plan on a terminal.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from time import perf_counter, process_time

import numpy as np

from megaloom.dsl import graph
from megaloom.dsl.catalog import find
from megaloom.planner import Workload, cluster
from megaloom.planner.bounds.lower_bounds import LowerBounds
from megaloom.planner.cost.cost_cache import CostCache
from megaloom.planner.cost.profiles.frameworks import OWN
from megaloom.planner.model.structure import model_structure
from megaloom.planner.search.candidate_space import CandidateSpace

PLANS = (
    ("--help",),
    ("llama3-8b", "--gpus", "8xH100"),
    ("gpt3-175b", "--gpus", "1024xH100", "--seq", "2048", "--batch", "1536"),
    ("deepseek-v3", "--gpus", "2048xH100", "--seq", "4096", "--batch", "8192"),
    ("deepseek-v3", "--gpus", "2048xH100", "--seq", "4096", "--batch", "15360"),
    ("deepseek-v3", "--gpus", "16384xH100", "--seq", "4096", "--batch", "16384"),
    ("deepseek-v3", "--gpus", "16384xH100", "--seq", "4096", "--batch", "15360"),
)
AT_ONCE = 1000  # base layouts in one call


def scored() -> tuple[int, int, float]:
    """Return (layouts scored, those of them that may fit, seconds)."""
    start = process_time()
    g, machine, work = graph(find("gpt3-175b")[0]), cluster("1024xH100"), Workload(seq=2048, batch=1536)
    space = CandidateSpace(g, machine, work, {})
    at = space.base_layouts()
    lower_bounds = LowerBounds(at, CostCache(model_structure(g), work, machine, OWN))
    count = fit = 0
    for first in range(0, len(at), AT_ONCE):
        indices = np.arange(first, min(first + AT_ONCE, len(at)))
        layouts, base = space.variants(at.take(indices), lower_bounds.module_sets(indices))
        bounds = lower_bounds.bound(layouts, indices[base])
        count += len(bounds)
        fit += int(np.count_nonzero(bounds.nbytes <= machine.device.nbytes))
    return count, fit, process_time() - start


def command(folder: str, *given: str) -> list[str]:
    """Return the command line of a `plan` that writes its output to a folder."""
    output = ("-o", f"{folder}/plan.json") * (given[0] != "--help")
    return [sys.executable, "-m", "megaloom.planner.cli.main", *given, *output]


ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


def planned(*given: str) -> float:
    """Return the processor seconds of a `plan`."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.times()
        subprocess.run(command(folder, *given), check=True, capture_output=True, env=ONE_THREAD)
        after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def first(*given: str) -> float:
    """Return the wall-clock seconds until a `plan` shows its best plan so far, or ends."""
    with tempfile.TemporaryDirectory() as folder:
        ours, its = os.openpty()
        began, shown = perf_counter(), b""
        plan = subprocess.Popen(command(folder, *given), stdout=subprocess.DEVNULL, stderr=its, env=ONE_THREAD)
        os.close(its)
        with suppress(OSError):  # it has ended
            while b"so far" not in shown:
                shown += os.read(ours, 4096)
        took = perf_counter() - began
        plan.kill()
        plan.wait()
        os.close(ours)
    return took


def main() -> None:
    count, fit, seconds = scored()
    print(f"scored  {count:,} legal layouts of gpt3-175b on 1024xH100, of which {fit:,} may fit: {seconds:.2f} s")
    for given in PLANS:
        took, sooner = (min(of(*given) for _ in range(2)) for of in (planned, first))
        print(f"plan {' '.join(given):<70}{took:>8.2f} s, first plan shown after {sooner:.2f}", flush=True)


if __name__ == "__main__":
    main()
