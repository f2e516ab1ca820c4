"""Causes of the time of a measured step that the prediction does not have, in seconds.

Each cause is priced: the step under a cluster or a program that is worse in one way, less the predicted step.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve, frozen

from megaloom.dsl.graph import Graph
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.plans import Plan
from megaloom.planner.search.pricing import Pricer

from .run import TrainingRun

LEAST = 0.002  # share of the step below which a cause is not worth a line
SLOWER = 0.9  # clock of a slow device


@frozen
class Cause:
    """A cause that would add so many seconds to a step, in words."""

    words: str
    seconds: float


def causes(run: TrainingRun, cluster: Cluster, g: Graph, plan: Plan) -> tuple[Cause, ...]:
    """Return causes that would make the step longer, the largest first. g: the graph with the run's stages."""
    step = plan.predicted.step_seconds
    out = []
    for words, worse in _worse(cluster):
        slower = Pricer(g, worse, run.workload, run.profile).price(run.layout).seconds - step
        if slower > LEAST * step:
            out.append(Cause(words, slower))
    return tuple(sorted(out, key=lambda cause: -cause.seconds))


def _worse(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Yield clusters that are worse in one way, with the words for it."""
    device, inter, intra = cluster.device, cluster.inter, cluster.intra
    if cluster.nodes > 1:
        slow = evolve(inter, efficiency=inter.efficiency / 2)
        yield f"network between nodes ({inter.name}) at half the bandwidth", evolve(cluster, inter=slow)
    if cluster.per_node > 1:
        slow = evolve(intra, efficiency=intra.efficiency / 2)
        yield f"links within a node ({intra.name}) at half the bandwidth", evolve(cluster, intra=slow)
    throttled = evolve(device, sustained=max(0.1, device.sustained * SLOWER))
    yield f"one rank with a clock {1 - SLOWER:.0%} lower, which all others wait for", evolve(cluster, device=throttled)
    late = evolve(device, launch_seconds=2 * device.launch_seconds)
    yield "a host that takes twice as long to launch a kernel", evolve(cluster, device=late)
