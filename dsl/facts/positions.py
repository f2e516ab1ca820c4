"""Longest sequences that the learned positions of a model allow."""

from __future__ import annotations

from megaloom.dsl.graph import Graph
from megaloom.dsl.node import primitives
from megaloom.dsl.ops.weight import PositionLookup


def longest(g: Graph) -> dict[str, int]:
    """Return, for each sequence dim of the workload, the number of rows of its shortest table of positions."""
    out: dict[str, int] = {}
    for v in (v for n in g.nodes for v, *_ in primitives(n.value)):
        if isinstance(v.op, PositionLookup):
            rows = v.args[1][v.op.key].known - v.op.offset
            for name in (d.name for d in v.shape if d.size is None):
                out[name] = min(out.get(name, rows), rows)
    return out
