"""Graphs with fewer cut points: between blocks, for runtimes whose stages are lists of whole layers.

`with_cut_points_of(graph, runtime)` returns the graph with the cut points that a runtime supports.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from itertools import pairwise

from attrs import frozen

from megaloom.dsl.graph import Graph
from megaloom.planner.contract.workload import Runtime


@frozen(eq=False, slots=False)
class RestrictedGraph(Graph):
    """A graph whose only cut points are those given."""

    allowed: frozenset[int] = frozenset()

    @cached_property
    def cut_points(self) -> tuple[int, ...]:
        """Return the allowed cut points, in order."""
        return tuple(i for i in super().cut_points if i in self.allowed)


@lru_cache(maxsize=16)
def with_cut_points_of(graph: Graph, runtime: Runtime) -> Graph:
    """Return the graph with the cut points of a runtime: ours has all, others only those between blocks."""
    numbers = [node.block for node in graph.nodes]
    allowed = frozenset(i for i, (a, b) in enumerate(pairwise(numbers), 1) if a != b)
    return graph if runtime is Runtime.MEGALOOM else RestrictedGraph(graph.name, graph.nodes, graph.outputs, allowed)
