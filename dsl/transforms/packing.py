"""A model for packed sequences, made of one for sequences of one document."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model, graph
from megaloom.dsl.layer import Given, Layer
from megaloom.dsl.ops.documents import DocumentIndices, documents
from megaloom.dsl.ops.weight import Input, Weight
from megaloom.dsl.rewriting import with_values
from megaloom.dsl.value import Value, apply

from .adapters import adapted


def packed(m: Model) -> Model:
    """Return the model with an input `documents` [batch seq], which all its layers read: attention stays inside
    documents, and learned positions restart. It has the weights of `m`.

    An encoder with a decoder gets `source_documents` [batch source] as well: each token of the decoder reads the
    positions of the source that have the index of its own document. Raises UserError for a model that reads no tokens.
    """
    return packed_with(m, lambda layer: layer)


def reads_tokens(m: Model) -> bool:
    """Return whether an input of the model has the dim `seq`, as tokens have and images do not."""
    return any(n.is_input and "seq" in n.shape for n in graph(m).nodes)


def packed_with(m: Model, change: Callable[[Layer], Layer]) -> Model:
    """Return the packed model after `change` of each layer."""
    if m.base is not None and m.lora is not None:
        return adapted(packed_with(m.base, change), m.lora)
    inputs = [n for n in graph(m).nodes if n.is_input]
    if any(isinstance(n.op, DocumentIndices) for n in inputs):
        return m
    if not reads_tokens(m):
        raise UserError(f"{m.name} reads no tokens, so it cannot read documents\nomit packed(model) and padded=true")
    source = next((n.shape["source"] for n in inputs if "source" in n.shape), None)
    rebuild = _Rebuild(documents(), None if source is None else documents("source_documents", source), change)
    return evolve(m, outputs=tuple(map(rebuild.value, m.outputs)))


class _Rebuild:
    """Applies the layers of a program again, after a change, with the side input `documents`.

    Layers of the source read its own indices, and those of a decoder both.
    """

    def __init__(self, indices: Value, source: Value | None, change: Callable[[Layer], Layer]) -> None:
        self.indices, self.source = indices, source
        self.change = change
        self.values: dict[int, Value] = {}

    def value(self, v: Value) -> Value:
        """Return the value of the new program."""
        if id(v) not in self.values:
            self.values[id(v)] = self.applied(v)
        return self.values[id(v)]

    def applied(self, v: Value) -> Value:
        if isinstance(v.op, Input | Weight):
            return v
        if isinstance(v.op, Layer):
            layer = self.change(with_values(v.op, self.value))
            side, x = self.side(v.args[0]), self.value(v.args[0])
            if self.source is not None and isinstance(layer, Given):  # one layer, so that nodes keep their order
                return x >> layer.inner.given(**side, **layer.side)
            return x >> layer.given(**side)
        return apply(v.op, *map(self.value, v.args))

    def side(self, x: Value) -> dict[str, Value]:
        """Return the document indices for a layer of this value."""
        if self.source is None:
            return {"documents": self.indices}
        if "source" in x.shape:
            return {"documents": self.source}
        return {"documents": self.indices, "memory_documents": self.source}
