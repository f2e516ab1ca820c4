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

from .linear import project


@frozen
class MLP(Layer):
    """down(act(up(x))) with ff hidden channels. `act` is any function of one value: gelu, relu, relu2, silu, …"""

    ff: int
    act: str = "gelu"
    bias: bool = False

    def body(self, x: Value, /, **side: Value) -> Value:
        e, f = x["embed"], Dim("ff", self.ff)
        h = fn(self.act, project("up", x, f, bias=self.bias))
        return project("down", h, e, over=("ff",), bias=self.bias)


@frozen
class SwiGLU(Layer):
    """down(silu(gate(x)) * up(x)), with ff hidden channels. Source: Shazeer, arXiv:2002.05202."""

    ff: int

    def body(self, x: Value, /, **side: Value) -> Value:
        return _gated("silu", x, self.ff)


@frozen
class GeGLU(Layer):
    """down(gelu(gate(x)) * up(x)), with ff hidden channels. Source: Shazeer, arXiv:2002.05202."""

    ff: int
    act: str = "gelu_tanh"

    def body(self, x: Value, /, **side: Value) -> Value:
        return _gated(self.act, x, self.ff)


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
        h = fn("mul", g * fn("sigmoid", 1.702 * g), u + 1.0, fusion="gate")
        return project("down", h, e, over=("ff",), bias=True)


def _gated(act: str, x: Value, ff: int) -> Value:
    e, f = x["embed"], Dim("ff", ff)
    h = fn("mul", fn(act, project("gate", x, f)), project("up", x, f), fusion="gate")
    return project("down", h, e, over=("ff",))
