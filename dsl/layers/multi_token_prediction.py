"""The input of a multi-token prediction block: hidden states joined with the embeddings of the next tokens."""

from __future__ import annotations

from attrs import frozen

from megaloom.dsl.layer import Layer
from megaloom.dsl.ops.sequence import Shift
from megaloom.dsl.ops.shape import Concat
from megaloom.dsl.value import Value, apply

from .embeddings import Embed
from .linear import Linear


@frozen
class Join(Layer):
    """A projection of [norm(embedding of the next token), norm(hidden state)] back to embed, at each position.

    The token ids are the side input `tokens`. Source: DeepSeek-V3, arXiv:2412.19437, equation 21.
    """

    table: Value
    norm: Layer

    def body(self, x: Value, /, tokens: Value, **side: Value) -> Value:
        embedded = apply(Shift("seq", 1), tokens) >> Embed(self.table)
        joined = apply(Concat("embed"), embedded >> self.norm.named("ahead_norm"), x >> self.norm.named("norm"))
        return joined >> Linear(x["embed"]).named("join")
