"""Whether searches find the layouts that NVIDIA published: `python benchmarks/recipes.py RUNS.jsonl [EVERY]`.

A recipe is a model on so many GPUs with a batch, a sequence and a precision, of the tables of Megatron-Bridge, NeMo and
DGX Cloud; its layouts are those published for it, by their degrees (tensor, pipeline, context, expert). They are looked
for among the five that `plan` would show, for the profile of that software. With EVERY only one recipe of so many is
searched.
"""

from __future__ import annotations

import sys
from collections import defaultdict

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import graph
from megaloom.planner.contract.layout import Layout
from megaloom.planner.search.candidates import Candidates
from megaloom.planner.search.device_meshes import best_of_each_mesh
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.search.search import PROVEN_MESHES, SIMULATED, search
from megaloom.planner.validate.run_files import read_runs
from megaloom.planner.validate.scoring import priced_as
from megaloom.planner.validate.training_run import TrainingRun

SOURCES = ("megatron-bridge", "nemo-docs", "dgxc-benchmarking")
CLOSE = 1.02  # a published layout that takes this much longer than our best, by our prices, is as good

Degrees = tuple[int, int, int, int]


def degrees(x: Layout) -> Degrees:
    return x.tp, x.pp, x.cp, x.ep


def recipes(path: str) -> list[list[TrainingRun]]:
    """The runs of each recipe. Models that lack layers for a benchmark's sake are none."""
    by: dict[tuple[object, ...], list[TrainingRun]] = defaultdict(list)
    for run in read_runs(path)[0]:
        if run.source in SOURCES and run.step_seconds and "proxy" not in run.name:
            by[run.name, run.gpu, run.layout.world, run.workload].append(run)
    return list(by.values())


def found(runs: list[TrainingRun]) -> tuple[bool, bool, str]:
    """Whether a published layout is among the first, whether one is as good as the best, and what was found."""
    run, published = runs[-1], {degrees(r.layout) for r in runs}
    pricer = Pricer(graph(run.model), run.cluster, run.workload, run.profile)
    best = search(Candidates(pricer, {}), PROVEN_MESHES, SIMULATED)
    shown = [degrees(p.layout) for p in best_of_each_mesh(best)[:PROVEN_MESHES]] if best else []
    first = not published.isdisjoint(shown)
    close = bool(best) and min(priced_as(r).seconds for r in runs) <= CLOSE * best[0].seconds
    said = f"{run.name} on {run.cluster}, batch {run.workload.batch}: {sorted(published)}, {shown}"
    return first, first or close, said


def main() -> None:
    chosen = recipes(sys.argv[1])[:: int(sys.argv[2]) if len(sys.argv) > 2 else 1]
    hits = near = 0
    for runs in chosen:
        try:
            hit, good, said = found(runs)
        except UserError as error:
            hit, good, said = False, False, str(error).partition("\n")[0]
        hits, near = hits + hit, near + good
        print("found " if hit else "close " if good else "missed", said, flush=True)
    print(
        f"of {len(chosen)} recipes {hits} are among our first {PROVEN_MESHES} ({hits / len(chosen):.0%}), {near} are as good"
    )


if __name__ == "__main__":
    main()
