"""A model for conversations, made of one that predicts every token: what the argument `conversations` asks for."""

from __future__ import annotations

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model, graph
from megaloom.dsl.layer import Layer
from megaloom.dsl.layers.losses import NextToken
from megaloom.dsl.ops.weight import mask
from megaloom.dsl.transforms.packing import packed_with


def for_conversations(m: Model) -> Model:
    """Return the packed model with a mask in each loss of the next token, so that training can predict the assistant's
    tokens only. It has the weights of `m`. Raises UserError if `m` does not predict the next token.
    """
    if not predicts_next_token(m):
        raise UserError(f"{m.name} does not predict the next token\nfor conversations give a decoder")
    counted = mask()

    def masked(layer: Layer) -> Layer:
        return evolve(layer, mask=counted) if isinstance(layer, NextToken) and layer.mask is None else layer

    return packed_with(m, masked)


def predicts_next_token(m: Model) -> bool:
    """Return whether a loss of the model is that of the next token."""
    return any(isinstance(n.op, NextToken) for n in graph(m).nodes)
