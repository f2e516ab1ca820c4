"""How far the cuts of interleaved chunks are from the best of all: `python benchmarks/cuts.py`, seconds.

Models of a few blocks as wide as Llama 3 8B's are cut into pipelines of two and three ranks, anywhere (as our runtime
does) and between blocks (as others do), with all the memory that they need. Every way to cut is tried: replayed in the
order of `pipeline.finish_bounds`, until no other can end sooner.
"""

from __future__ import annotations

from itertools import combinations, product
from math import inf

import numpy as np

from megaloom.dsl.graph import graph
from megaloom.examples.llama3 import llama
from megaloom.planner.bounds import pipeline
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Runtime, Workload
from megaloom.planner.cost.columns import BACKWARD_COLUMNS, FORWARD_COLUMNS
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.partition.partitioner import Partition
from megaloom.planner.partition.whole_blocks import with_cut_points_of
from megaloom.planner.pipeline import schedules
from megaloom.planner.search.pricing import Pricer

CHUNKS = ((2, 2), (2, 3), (3, 2))  # ranks, and chunks of each
BLOCKS = {Runtime.MEGALOOM: (8, 10), Runtime.MEGATRON: (12, 16)}
ROUNDS = (1, 2, 4, 8)  # micro-batches by rank


def lost(placed: Partition) -> float:
    """The share of its makespan by which a cut is slower than the best; nothing passes between stages."""
    x, m, places = placed.layout, placed.problem.microbatches, placed.problem.cut_points
    count = x.pp * x.vpp
    before = np.concatenate([np.zeros((1, 2)), np.cumsum(_both(placed.problem.table.by_node), axis=0)])[places]
    ways = np.array([(0, *inner, len(places) - 1) for inner in combinations(range(1, len(places) - 1), count - 1)])
    ahead, back = np.moveaxis(before[ways[:, 1:]] - before[ways[:, :-1]], 2, 0)
    bounds = pipeline.finish_bounds(ahead, back, np.zeros(ahead.shape), x.pp, np.full(len(ways), m), 0).max(axis=1)
    best, none = inf, [0.0] * count
    for i in np.argsort(bounds).tolist():
        if bounds[i] >= best:
            break
        best = min(best, max(schedules.finish_times(ahead[i].tolist(), back[i].tolist(), none, x.pp, m)))
    chosen = _both(placed.stage_sums).T.tolist()
    return max(schedules.finish_times(*chosen, none, x.pp, m)) / best - 1


def _both(sums: np.ndarray) -> np.ndarray:
    """Seconds forward and backward: [..., 2]."""
    return np.stack([sums[:, FORWARD_COLUMNS].sum(axis=1), sums[:, BACKWARD_COLUMNS].sum(axis=1)], axis=1)


def main() -> None:
    for runtime, layers in BLOCKS.items():
        found = []
        for n, (pp, vpp), rounds in product(layers, CHUNKS, ROUNDS):
            g = with_cut_points_of(graph(llama("wide", n, heads=32, kv_heads=8, embed=4096, ff=14336)), runtime)
            work = Workload(seq=4096, batch=pp * rounds)
            pricer = Pricer(g, cluster(f"{pp}xH100"), work, headroom=-20)  # all fits
            found.append(lost(pricer.partition(Layout(pp=pp, vpp=vpp))))
        median, most, worst = np.percentile(found, [50, 90, 100])
        print(f"{runtime:<9} {len(found)} pipelines: {median:.1%} in the median, 90 % {most:.1%}, most {worst:.1%}")


if __name__ == "__main__":
    main()
