"""Compare searches with the layouts that NVIDIA published: `python -m benchmarks.recipes [EVERY [PROCESSES]]`.

A recipe is a model, a number of GPUs, a batch, a sequence length and a precision from the tables of Megatron-Bridge,
NeMo and DGX Cloud, among the published runs of benchmarks/accuracy. It is found if the device mesh (dp, tp, pp, cp, ep,
etp) of one of its published layouts is among the best five of a search under the framework profile of the run, with
the format of its gradients. The simplest layouts come first, as in a plan, or the fastest, as in one with `--fastest`.
The SHA-256 of a recipe says to which half it belongs; no rule of the search was chosen by either. With EVERY, only
every so many recipes are searched.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from hashlib import sha256

from attrs import frozen

from benchmarks.accuracy.run_files import DATA, read_runs
from benchmarks.accuracy.scoring import priced_as
from benchmarks.accuracy.training_run import TrainingRun
from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import graph
from megaloom.planner.contract.choices import GradReduce
from megaloom.planner.search.branch_and_bound import PROVEN_MESHES, SIMULATED, search
from megaloom.planner.search.candidates import Candidates
from megaloom.planner.search.device_meshes import TIE_RATIO, DeviceMesh, device_mesh
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.search.simple_first import NEAR_RATIO, best_of_each_mesh, preferred
from megaloom.planner.simulate.price import Priced

SOURCES = ("megatron-bridge", "nemo-docs", "dgxc-benchmarking")
CLOSE = 1.02  # a published layout whose predicted time is within this factor of our best one is as good


@frozen(kw_only=True)
class Compared:
    """A recipe beside our five best device meshes: simple first, and fastest first."""

    name: str
    half: int
    published: tuple[DeviceMesh, ...] = ()
    simple: tuple[DeviceMesh, ...] = ()
    fastest: tuple[DeviceMesh, ...] = ()
    slower: float = 0.0  # share by which the recommended layout is slower than the fastest
    behind: float = 0.0  # share by which the best of the published layouts is slower than the fastest
    error: str = ""

    @property
    def found(self) -> bool:
        """Return whether the recipe is among the five meshes, the simplest first."""
        return not set(self.published).isdisjoint(self.simple)

    @property
    def found_by_time(self) -> bool:
        """Return whether it is among the five fastest meshes."""
        return not set(self.published).isdisjoint(self.fastest)

    @property
    def close(self) -> bool:
        """Return whether it is found, or predicted to be as good as the fastest layout."""
        return self.found or (not self.error and 1 + self.behind <= CLOSE)


@cache
def recipes() -> list[list[TrainingRun]]:
    """Return the runs of each recipe, without models whose layers were reduced for a benchmark."""
    by: dict[tuple[object, ...], list[TrainingRun]] = defaultdict(list)
    for run in read_runs(DATA / "published_runs.jsonl")[0]:
        if run.source in SOURCES and run.step_seconds and "proxy" not in run.name:
            by[run.name, run.gpu, run.layout.world, run.workload].append(run)
    return list(by.values())


def compare(number: int) -> Compared:
    """Return the recipe of this number beside the best meshes of a search."""
    runs = recipes()[number]
    run = runs[-1]
    name = f"{run.name} on {run.cluster}, {run.workload}"
    half = sha256(name.encode()).digest()[-1] % 2
    try:
        pricer = Pricer(graph(run.model), run.cluster, run.workload, run.profile)
        fixed = {} if run.layout.grad_reduce is GradReduce.FP32 else {"grad_reduce": run.layout.grad_reduce}
        found = search(Candidates(pricer, fixed), PROVEN_MESHES, SIMULATED)
        published = min(priced_as(r).seconds for r in runs)
    except UserError as error:
        return Compared(name=name, half=half, error=str(error).partition("\n")[0])
    if not found:
        return Compared(name=name, half=half, error="no layout fits")
    return Compared(
        name=name,
        half=half,
        published=tuple(sorted({device_mesh(r.layout) for r in runs})),
        simple=_meshes(found, NEAR_RATIO),
        fastest=_meshes(found, TIE_RATIO),
        slower=preferred(found, NEAR_RATIO).seconds / found[0].seconds - 1,
        behind=published / found[0].seconds - 1,
    )


def _meshes(found: list[Priced], ratio: float) -> tuple[DeviceMesh, ...]:
    return tuple(device_mesh(p.layout) for p in best_of_each_mesh(found, ratio)[:PROVEN_MESHES])


def text(c: Compared) -> str:
    """Return the line of a recipe."""
    word = "found" if c.found else "close" if c.close else "missed"
    if c.error:
        return f"{word:6} {c.half} {c.name}: {c.error}"
    changed = "" if c.found == c.found_by_time else f", fastest first {'' if c.found_by_time else 'not '}found"
    speeds = f"ours {c.slower:.1%} slower than the fastest, published {c.behind:.1%}"
    return f"{word:6} {c.half} {c.name}: {list(c.published)}, ours {list(c.simple)}; {speeds}{changed}"


def summary(compared: list[Compared], title: str) -> str:
    """Return the shares of recipes that are found, simple first and fastest first, and of those as good."""
    count = max(1, len(compared))
    found, by_time, close = (
        sum(each) for each in zip(*((c.found, c.found_by_time, c.close) for c in compared), strict=True)
    )
    return (
        f"{title}: {found} of {len(compared)} recipes ({found / count:.0%}) are among our best {PROVEN_MESHES} meshes, "
        f"{by_time} ({by_time / count:.0%}) with the fastest first; {close} ({close / count:.0%}) are as good"
    )


def main() -> None:
    every, processes = (int(word) for word in (*sys.argv[1:], *("1", "1")[len(sys.argv) - 1 :]))
    compared = []
    with ProcessPoolExecutor(processes) as pool:
        for each in pool.map(compare, range(0, len(recipes()), every)):
            compared.append(each)
            print(text(each), flush=True)
    for half in (0, 1):
        print(summary([c for c in compared if c.half == half], f"half {half}"))
    print(summary(compared, "all"))


if __name__ == "__main__":
    main()
