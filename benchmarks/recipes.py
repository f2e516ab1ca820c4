"""Compare searches with the layouts that NVIDIA published: `python benchmarks/recipes.py [EVERY]`.

A recipe is a model, a number of GPUs, a batch, a sequence length and a precision from the tables of Megatron-Bridge,
NeMo and DGX Cloud, among the published runs of benchmarks/accuracy. Its published layouts are compared by their
degrees (tp, pp, cp, ep) with the five best device meshes of a search under the framework profile of the run. With
EVERY, only every so many recipes are searched.
"""

from __future__ import annotations

import sys
from collections import defaultdict

from benchmarks.accuracy.run_files import DATA, read_runs
from benchmarks.accuracy.scoring import priced_as
from benchmarks.accuracy.training_run import TrainingRun
from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import graph
from megaloom.planner.contract.layout import Layout
from megaloom.planner.search.candidates import Candidates
from megaloom.planner.search.device_meshes import best_of_each_mesh
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.search.search import PROVEN_MESHES, SIMULATED, search

SOURCES = ("megatron-bridge", "nemo-docs", "dgxc-benchmarking")
CLOSE = 1.02  # a published layout whose predicted time is within this factor of our best one is as good

Degrees = tuple[int, int, int, int]


def degrees(x: Layout) -> Degrees:
    """Return tp, pp, cp and ep."""
    return x.tp, x.pp, x.cp, x.ep


def recipes() -> list[list[TrainingRun]]:
    """Return the runs of each recipe, without models whose layers were reduced for a benchmark."""
    by: dict[tuple[object, ...], list[TrainingRun]] = defaultdict(list)
    for run in read_runs(DATA / "published_runs.jsonl")[0]:
        if run.source in SOURCES and run.step_seconds and "proxy" not in run.name:
            by[run.name, run.gpu, run.layout.world, run.workload].append(run)
    return list(by.values())


def compare(runs: list[TrainingRun]) -> tuple[bool, bool, str]:
    """Return (a published layout is among the first meshes, one is as good as the best layout, line of text)."""
    run, published = runs[-1], {degrees(r.layout) for r in runs}
    pricer = Pricer(graph(run.model), run.cluster, run.workload, run.profile)
    best = search(Candidates(pricer, {}), PROVEN_MESHES, SIMULATED)
    shown = [degrees(p.layout) for p in best_of_each_mesh(best)[:PROVEN_MESHES]] if best else []
    hit = not published.isdisjoint(shown)
    close = bool(best) and min(priced_as(r).seconds for r in runs) <= CLOSE * best[0].seconds
    text = f"{run.name} on {run.cluster}, batch {run.workload.batch}: {sorted(published)}, {shown}"
    return hit, hit or close, text


def main() -> None:
    chosen = recipes()[:: int(sys.argv[1]) if len(sys.argv) > 1 else 1]
    hits = near = 0
    for runs in chosen:
        try:
            hit, good, text = compare(runs)
        except UserError as error:
            hit, good, text = False, False, str(error).partition("\n")[0]
        hits, near = hits + hit, near + good
        print("found " if hit else "close " if good else "missed", text, flush=True)
    share = f"{hits / len(chosen):.0%}"
    print(f"{hits} of {len(chosen)} recipes ({share}) are among our first {PROVEN_MESHES} meshes, {near} are as good")


if __name__ == "__main__":
    main()
