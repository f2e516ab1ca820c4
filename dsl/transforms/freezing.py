"""A model that is not trained, made of one that is: the reference or the teacher of another model."""

from __future__ import annotations

from attrs import evolve

from megaloom.dsl.graph import Model
from megaloom.dsl.ops.weight import Weight
from megaloom.dsl.rewriting import rewritten
from megaloom.dsl.value import Value

from .adapters import frozen_weight


def freeze(m: Model) -> Model:
    """Return the model with all weights frozen: plans of it count neither gradients nor optimizer state.

    It computes what `m` computes, of weights with the names that they have in `m`.
    """

    def change(old: Value, copy: Value) -> Value:
        return frozen_weight(copy) if isinstance(copy.op, Weight) else copy

    return evolve(m, outputs=rewritten(m.outputs, change))
