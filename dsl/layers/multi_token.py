"""What a layer reads that predicts tokens further ahead: hidden states, and the token after each."""

from __future__ import annotations

from attrs import frozen

from megaloom.dsl.layer import Layer
from megaloom.dsl.ops.sequence import Shift
from megaloom.dsl.ops.shape import Concat
from megaloom.dsl.value import Value, apply

from .tokenwise import Embed, Linear


@frozen
class Join(Layer):
    """The normalized hidden state of a position and the embedding of the next token, mixed into one.

    Source: multi-token prediction, DeepSeek-V3, arXiv:2412.19437, equation 21.
    """

    table: Value
    norm: Layer

    def body(self, x: Value, /, tokens: Value, **side: Value) -> Value:
        ahead = apply(Shift("seq", 1), tokens) >> Embed(self.table)
        both = apply(Concat("embed"), ahead >> self.norm.named("ahead_norm"), x >> self.norm.named("norm"))
        return both >> Linear(x["embed"]).named("join")
