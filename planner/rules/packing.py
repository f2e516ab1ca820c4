"""Packed sequences: refusal of layers by which tokens would read other documents."""

from __future__ import annotations

from functools import lru_cache

from megaloom.dsl import DocumentIndices, Graph
from megaloom.dsl.node import primitives
from megaloom.dsl.ops.loss import is_loss
from megaloom.dsl.work_kinds import WorkKind

from .rule import Words


@lru_cache(maxsize=16)
def document_mixing(graph: Graph) -> Words | None:
    """Return the refusal of a model with document indices in which a layer reads across documents; else None."""
    if not any(isinstance(n.op, DocumentIndices) for n in graph.nodes):
        return None
    for n in (n for n in graph.nodes if not is_loss(n.value)):  # a loss is of all documents
        for v, *_ in primitives(n.value):
            if not v.op.mixes_documents(v):
                continue
            if v.op.work_kind is WorkKind.ATTENTION:
                return (
                    f"{n.name} does not read the document indices of the model, so its tokens would read other "
                    "documents",
                    "give them to the whole model: `layers.given(documents=documents())`",
                )
            return (
                f"{n.name} applies {type(v.op).__name__} along the sequence, which reads across documents",
                "train this model without document indices: one document, or text of one stream, in each sequence",
            )
    return None
