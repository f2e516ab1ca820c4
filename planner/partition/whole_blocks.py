"""Graphs that are cut at fewer places: between whole blocks, as programs do whose stages are lists of layers.

Protocol: `blocks` is a graph as another runtime cuts it; nodes and outputs stay.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from itertools import pairwise

from attrs import frozen

from megaloom.dsl.graph import Graph
from megaloom.planner.contract.workload import Runtime


@frozen(eq=False, slots=False)
class Whole(Graph):
    """A graph that is cut at these borders only."""

    borders: frozenset[int] = frozenset()

    @cached_property
    def cut_points(self) -> tuple[int, ...]:
        return tuple(i for i in super().cut_points if i in self.borders)


@lru_cache(maxsize=16)
def blocks(graph: Graph, runtime: Runtime) -> Graph:
    """The graph as this runtime cuts it: ours anywhere, others between blocks, so norm and logits stay together."""
    numbers = [node.block for node in graph.nodes]
    borders = frozenset(i for i, (a, b) in enumerate(pairwise(numbers), 1) if a != b)
    return graph if runtime is Runtime.MEGALOOM else Whole(graph.name, graph.nodes, graph.outputs, borders)
