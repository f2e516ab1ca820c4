"""A model for packed sequences, made of one for sequences of one document."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model, graph
from megaloom.dsl.layer import Layer
from megaloom.dsl.ops.documents import DocumentIndices, documents
from megaloom.dsl.ops.weight import Input, Weight
from megaloom.dsl.rewriting import with_values
from megaloom.dsl.value import Value, apply

from .adapters import adapted


def packed(m: Model) -> Model:
    """Return the model with an input `documents` [batch seq], which all its layers read: attention stays inside
    documents, and learned positions restart. It has the weights of `m`. Raises UserError if `m` reads two sequences.
    """
    return packed_with(m, lambda layer: layer)


def packed_with(m: Model, change: Callable[[Layer], Layer]) -> Model:
    """Return the packed model after `change` of each layer. Raises UserError as `packed`."""
    if m.base is not None and m.lora is not None:
        return adapted(packed_with(m.base, change), m.lora)
    inputs = [n for n in graph(m).nodes if n.is_input]
    if any(isinstance(n.op, DocumentIndices) for n in inputs):
        return m
    if any("source" in n.shape for n in inputs):
        raise UserError(
            f"cannot give {m.name} one input of document indices: it reads two sequences\n"
            "give its layers both: `documents` of its own sequence, `memory_documents` of the source"
        )
    rebuild = _Rebuild(documents(), change)
    return evolve(m, outputs=tuple(map(rebuild.value, m.outputs)))


class _Rebuild:
    """Applies the layers of a program again, after a change, with the side input `documents`."""

    def __init__(self, indices: Value, change: Callable[[Layer], Layer]) -> None:
        self.indices = indices
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
            return self.value(v.args[0]) >> layer.given(documents=self.indices)
        return apply(v.op, *map(self.value, v.args))
