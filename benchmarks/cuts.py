"""Compare partitions of interleaved pipelines with the optimal ones: `python benchmarks/cuts.py`, seconds.

Models of a few blocks as wide as Llama 3 8B's are partitioned over two and three pipeline ranks, with unlimited memory:
at every cut point (as our runtime does) and between blocks (as Megatron does). The optimum is found by simulating
partitions in the order of their bound, `pipeline.finish_bounds`, until no other one can end sooner.
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


def excess(partition: Partition) -> float:
    """Return makespan / optimal makespan - 1 of a partition. Sends between stages take no time."""
    x, m, cut_points = partition.layout, partition.problem.microbatches, partition.problem.cut_points
    count, last = x.pp * x.vpp, len(cut_points) - 1
    sums = np.concatenate([np.zeros((1, 2)), np.cumsum(_passes(partition.problem.table.by_node), axis=0)])[cut_points]
    all_bounds = np.array([(0, *inner, last) for inner in combinations(range(1, last), count - 1)])
    forward, backward = np.moveaxis(sums[all_bounds[:, 1:]] - sums[all_bounds[:, :-1]], 2, 0)
    microbatches = np.full(len(all_bounds), m)
    bounds = pipeline.finish_bounds(forward, backward, np.zeros(forward.shape), x.pp, microbatches, 0).max(axis=1)
    best, no_sends = inf, [0.0] * count
    for i in np.argsort(bounds).tolist():
        if bounds[i] >= best:
            break
        best = min(best, max(schedules.finish_times(forward[i].tolist(), backward[i].tolist(), no_sends, x.pp, m)))
    own_forward, own_backward = _passes(partition.stage_sums).T.tolist()
    return max(schedules.finish_times(own_forward, own_backward, no_sends, x.pp, m)) / best - 1


def _passes(sums: np.ndarray) -> np.ndarray:
    """Return seconds of the forward and the backward pass: [..., 2]."""
    return np.stack([sums[:, FORWARD_COLUMNS].sum(axis=1), sums[:, BACKWARD_COLUMNS].sum(axis=1)], axis=1)


def main() -> None:
    for runtime, layers in BLOCKS.items():
        excesses = []
        for n, (pp, vpp), rounds in product(layers, CHUNKS, ROUNDS):
            g = with_cut_points_of(graph(llama("wide", n, heads=32, kv_heads=8, embed=4096, ff=14336)), runtime)
            work = Workload(seq=4096, batch=pp * rounds)
            pricer = Pricer(g, cluster(f"{pp}xH100"), work, headroom=-20)  # every partition fits
            excesses.append(excess(pricer.partition(Layout(pp=pp, vpp=vpp))))
        median, most, worst = np.percentile(excesses, [50, 90, 100])
        print(f"{runtime:<9} {len(excesses)} pipelines: median {median:.1%}, 90 % below {most:.1%}, worst {worst:.1%}")


if __name__ == "__main__":
    main()
