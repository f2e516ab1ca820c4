"""Packed sequences: refusal of layers by which tokens would read other documents."""

from __future__ import annotations

from functools import lru_cache

from megaloom.dsl import Attend, Conv, DocumentIndices, Graph, Node, Scan, Select, Shift, Value
from megaloom.dsl.node import primitives
from megaloom.dsl.sharding_table import SEQUENCES

from .rule import Words


@lru_cache(maxsize=16)
def document_mixing(graph: Graph) -> Words | None:
    """Return the refusal of a model with document indices in which a layer reads across documents; else None."""
    if not any(isinstance(n.op, DocumentIndices) for n in graph.nodes):
        return None
    for n in graph.nodes:
        for v, *_ in primitives(n.value):
            if words := _refusal(n, v):
                return words
    return None


def _refusal(n: Node, v: Value) -> Words | None:
    match v.op:
        case Attend(documents=False):
            return (
                f"{n.name} does not read the document indices of the model, so its tokens would read other documents",
                "give them to the whole model: `layers.given(documents=documents())`",
            )
        case Conv() | Scan() | Shift():
            what = {Conv: "convolution", Scan: "selective scan", Shift: "shift"}[type(v.op)]
            return (
                f"{n.name} has a {what} along the sequence, which reads across documents",
                "train this model without document indices: one document, or text of one stream, in each sequence",
            )
        case Select(dim, index) if dim in SEQUENCES and index != 0:  # the first position reads the first document only
            return (
                f"{n.name} reads one position of each sequence, but a packed sequence has several documents",
                "train this model without document indices",
            )
    return None
