"""How long searches take: `python benchmarks/search.py`, seconds of one core (processor time, with what is imported).

scored: every legal layout of GPT-3 175B on 1,024 H100 gets its bounds, seconds and bytes, none left out beforehand.
plans: `plan` end to end in a process of its own, its output included; twice, the quicker one. And how long, by the
clock, until it shows a first plan that fits, where a terminal watches.
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
from megaloom.planner.search.candidate_space import base_layouts, variants

PLANS = (
    ("--help",),
    ("llama3-8b", "--gpus", "8xH100"),
    ("gpt3-175b", "--gpus", "1024xH100", "--seq", "2048", "--batch", "1536"),
    ("deepseek-v3", "--gpus", "2048xH100", "--seq", "4096", "--batch", "8192"),
    ("deepseek-v3", "--gpus", "16384xH100", "--seq", "4096", "--batch", "16384"),
)
AT_ONCE = 1000  # places


def scored() -> tuple[int, int, float]:
    """How many layouts were scored, how many of them may fit, and in how many seconds."""
    began = process_time()
    g, machine, work = graph(find("gpt3-175b")[0]), cluster("1024xH100"), Workload(seq=2048, batch=1536)
    at = base_layouts(g, machine, work, {})
    lower_bounds = LowerBounds(at, CostCache(model_structure(g), work, machine, OWN))
    count = fit = 0
    for first in range(0, len(at), AT_ONCE):
        which = np.arange(first, min(first + AT_ONCE, len(at)))
        layouts, place = variants(g, work, at.take(which), {}, lower_bounds.module_sets(which))
        found = lower_bounds.bound(layouts, which[place])
        count += len(found)
        fit += int(np.count_nonzero(found.nbytes <= machine.device.nbytes))
    return count, fit, process_time() - began


def command(folder: str, *given: str) -> list[str]:
    """A `plan` in a process of its own, with a folder to write in."""
    output = ("-o", f"{folder}/plan.json") * (given[0] != "--help")
    return [sys.executable, "-m", "megaloom.planner.cli.main", *given, *output]


ALONE = os.environ | {"OMP_NUM_THREADS": "1"}


def planned(*given: str) -> float:
    """Seconds of a `plan` from its start to its end."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.times()
        subprocess.run(command(folder, *given), check=True, capture_output=True, env=ALONE)
        after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def first(*given: str) -> float:
    """Seconds of the clock until a `plan` has something to show: its best so far, or all of it."""
    with tempfile.TemporaryDirectory() as folder:
        ours, its = os.openpty()
        began, shown = perf_counter(), b""
        plan = subprocess.Popen(command(folder, *given), stdout=subprocess.DEVNULL, stderr=its, env=ALONE)
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
        print(f"plan {' '.join(given):<70}{took:>8.2f} s, the first shown after {sooner:.2f}", flush=True)


if __name__ == "__main__":
    main()
