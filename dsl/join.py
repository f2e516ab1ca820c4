"""What a layer reads that predicts tokens further ahead: hidden states, and the token after each."""

from __future__ import annotations

from attrs import frozen

from .layer import Layer
from .layers import Embed, Linear
from .scan import Shift
from .value import Value, apply
from .views import Concat


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
