"""Ops that are not built in. Until an op can declare it, nothing is known of the dims that it reads or of its work."""

from __future__ import annotations

from functools import lru_cache

from attrs import frozen

from megaloom.dsl.facts.primitives import program
from megaloom.dsl.files.built_in import is_built_in
from megaloom.dsl.graph import Graph


@frozen
class OwnOp:
    """A class of ops that is not built in, and the first node that applies it."""

    name: str
    node: str


@lru_cache(maxsize=64)
def own_ops(graph: Graph) -> tuple[OwnOp, ...]:
    """Return the classes of ops in a graph that are not built in, in the order of the model."""
    first: dict[str, OwnOp] = {}
    for node in graph.nodes:
        for step in program(node).steps:
            if not is_built_in(step.value.op):
                name = type(step.value.op).__name__
                first.setdefault(name, OwnOp(name, node.name))
    return tuple(first.values())
