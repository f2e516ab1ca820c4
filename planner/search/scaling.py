"""The best layout on each of several clusters, and in less and less memory.

`clusters_in_range` reads `8..4096xH100`, `scaling_points` searches each cluster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from enum import Enum

from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Graph
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.workload import Runtime, Workload
from megaloom.planner.cost.profiles.frameworks import PROFILES
from megaloom.planner.hardware.cluster_names import cluster, is_range
from megaloom.planner.partition.whole_blocks import with_cut_points_of
from megaloom.planner.simulate.price import Priced

from .branch_and_bound import search
from .candidates import Candidates
from .device_meshes import TIE_RATIO
from .infeasible import check_ranges
from .pricing import Pricer
from .simple_first import NEAR_RATIO, preferred
from .variant_choices import FixedAxes

MEMORY_STEP = 0.8  # memory limit of the next layout of a Pareto front, as a share of the memory of the last one


class Goal(Enum):
    """The layout of a cluster that is shown, as `plan` chooses it, or several."""

    SIMPLEST = "the simplest of those at most 1 % slower than the fastest"
    FASTEST = "the fastest"
    PARETO = "the fastest in less and less memory"


@frozen
class ScalingPoint:
    """A cluster and its best layout; None if no layout is legal and fits."""

    cluster: Cluster
    best: Priced | None


def clusters_in_range(text: str) -> tuple[Cluster, ...]:
    """Return the clusters that `8..4096xH100` names, each twice as large as the one before; one for `64xH100`.

    Raises UserError for a text that is no range of at least one device.
    """
    if not is_range(text):
        return (cluster(text),)
    match = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*(.*)", text, re.DOTALL)
    if not match:
        raise UserError(f"`--gpus {text}` is not a range of clusters\nwrite it as 8..4096xH100")
    low, high = int(match[1]), int(match[2])
    if not 1 <= low <= high:
        raise UserError(
            f"`--gpus {text}` is a range from {low} to {high} devices\n"
            "begin it with the smaller number, at least 1: 8..4096xH100"
        )
    counts, kind = [], match[3] or "xH100"
    while low <= high:
        counts.append(low)
        low *= 2
    return tuple(cluster(f"{count}{kind}") for count in counts)


def scaling_points(
    graph: Graph,
    row: Iterable[Cluster],
    work: Callable[[Cluster], Workload],
    fixed: FixedAxes,
    headroom: float,
    runtime: Runtime = Runtime.MEGALOOM,
    goal: Goal = Goal.SIMPLEST,
) -> Iterator[ScalingPoint]:
    """Yield the layout of each cluster that reaches the goal, from the smallest cluster on.

    Goal.PARETO: yield the Pareto front over time per token, memory and devices, in memory steps of MEMORY_STEP.
    """
    parted, shown = with_cut_points_of(graph, runtime), list[tuple[float, int]]()
    pareto, ratio = goal is Goal.PARETO, NEAR_RATIO if goal is Goal.SIMPLEST else TIE_RATIO
    for machine in row:
        check_ranges(fixed, graph, work(machine), machine)
        free, best = headroom, None
        while (
            priced := _best(Pricer(parted, machine, work(machine), PROFILES[runtime], free), fixed, ratio)
        ) is not None:
            best, nbytes = priced, max(priced.partition.peaks)
            each = best.seconds / work(machine).tokens
            if not (pareto and any(quick <= each and lean <= nbytes for quick, lean in shown)):
                shown.append((each, nbytes))
                yield ScalingPoint(machine, best)
            free = 1 - MEMORY_STEP * nbytes / machine.device.nbytes
            if not pareto or free >= 1:
                break
        if best is None:
            yield ScalingPoint(machine, None)


def _best(pricer: Pricer, fixed: FixedAxes, ratio: float) -> Priced | None:
    candidates = Candidates(pricer, fixed)
    simulated = search(candidates, 1) if len(candidates.base_layouts) else []
    return preferred(simulated, ratio) if simulated else None
