"""Feed-forward layers: MLP and its gated variants."""

from __future__ import annotations

from attrs import frozen

from megaloom.dsl.dims import Dim
from megaloom.dsl.layer import Layer
from megaloom.dsl.value import (
    Clamp,
    Value,
    apply,
    fn,
)

from .linear import check_probability, dropped, project

# Tensors that a gated unit other than SwiGLU saves when each of its operations is a kernel: the activation, and its
# factor with an offset; where gate and factor are clamped, also the gate and its sigmoid (megatron-core 0.16.1,
# transformer/mlp.py: glu).
GATE, CLAMPED_GATE = 2, 4


@frozen
class MLP(Layer):
    """down(act(up(x))) with ff hidden channels. `act` is any function of one value: gelu, relu, relu2, silu, …

    dropout: of the hidden channels.
    """

    ff: int
    act: str = "gelu"
    bias: bool = False
    dropout: float = 0.0

    def __attrs_post_init__(self) -> None:
        check_probability("dropout", self.dropout)

    def body(self, x: Value, /, **side: Value) -> Value:
        e, f = x["embed"], Dim("ff", self.ff)
        h = dropped(fn(self.act, project("up", x, f, bias=self.bias)), self.dropout)
        return project("down", h, e, over=("ff",), bias=self.bias)


@frozen
class SwiGLU(Layer):
    """down(silu(gate(x)) * up(x)), with ff hidden channels. Source: Shazeer, arXiv:2002.05202.

    bias: of all three projections.
    """

    ff: int
    bias: bool = False

    def body(self, x: Value, /, **side: Value) -> Value:
        return _gated("silu", x, self.ff, eager_tensors=0, bias=self.bias)


@frozen
class GeGLU(Layer):
    """down(gelu(gate(x)) * up(x)), with ff hidden channels. Source: Shazeer, arXiv:2002.05202.

    dropout: of the hidden channels.
    """

    ff: int
    act: str = "gelu_tanh"
    dropout: float = 0.0

    def __attrs_post_init__(self) -> None:
        check_probability("dropout", self.dropout)

    def body(self, x: Value, /, **side: Value) -> Value:
        return _gated(self.act, x, self.ff, eager_tensors=GATE, dropout=self.dropout)


@frozen
class ClampedGLU(Layer):
    """down(g sigmoid(1.702 g) (u + 1)), with g = min(gate(x), limit) and u = up(x) clamped to ±limit.

    All three projections have biases. Source: GPT-OSS, arXiv:2508.10925.
    """

    ff: int
    limit: float = 7.0

    def body(self, x: Value, /, **side: Value) -> Value:
        e, f = x["embed"], Dim("ff", self.ff)
        g = apply(Clamp(None, self.limit), project("gate", x, f, bias=True))
        u = apply(Clamp(-self.limit, self.limit), project("up", x, f, bias=True))
        h = fn("mul", g * fn("sigmoid", 1.702 * g), u + 1.0, fusion="gate", eager_tensors=CLAMPED_GATE)
        return project("down", h, e, over=("ff",), bias=True)


def _gated(act: str, x: Value, ff: int, *, eager_tensors: int, dropout: float = 0.0, bias: bool = False) -> Value:
    e, f = x["embed"], Dim("ff", ff)
    gate, up = fn(act, project("gate", x, f, bias=bias)), project("up", x, f, bias=bias)
    h = dropped(fn("mul", gate, up, fusion="gate", eager_tensors=eager_tensors), dropout)
    return project("down", h, e, over=("ff",), bias=bias)
