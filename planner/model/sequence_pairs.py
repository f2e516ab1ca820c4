"""Values over two sequences. Each device has its part of both, and knows nothing of pairs from two parts."""

from __future__ import annotations

from functools import lru_cache

from megaloom.dsl.facts.primitives import program
from megaloom.dsl.graph import Graph
from megaloom.dsl.sharding_table import SEQUENCES


@lru_cache(maxsize=64)
def sequence_pair(graph: Graph) -> tuple[str, tuple[str, ...]] | None:
    """Return the first node that computes a value over two sequences, and their dims; None if there is none."""
    for node in graph.nodes:
        for step in program(node).steps:
            dims = tuple(d.name for d in step.value.shape if d.name in SEQUENCES)
            if len(dims) > 1:
                return node.name, dims
    return None
