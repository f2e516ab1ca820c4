"""Norms: RMSNorm and LayerNorm."""

from __future__ import annotations

from attrs import field, frozen

from megaloom.dsl.dims import Dim
from megaloom.dsl.layer import Layer
from megaloom.dsl.ops.norm import Normalize
from megaloom.dsl.ops.weight import weight
from megaloom.dsl.value import Value, apply


@frozen
class RMSNorm(Layer):
    """x / sqrt(mean(x²) + eps) * scale. Source: Zhang & Sennrich, arXiv:1910.07467.

    over: the dim that is normalised. plus_one: the weight is scale - 1 and starts at 0, as in Gemma.
    """

    eps: float = 1e-5
    over: str = field(default="embed", kw_only=True)
    plus_one: bool = field(default=False, kw_only=True)

    def body(self, x: Value, /, **side: Value) -> Value:
        return apply(Normalize((self.over,), False, self.eps), x, _scale(x[self.over], self.plus_one))


@frozen
class LayerNorm(Layer):
    """(x - mean(x)) / sqrt(var(x) + eps) * scale + shift. Source: Ba et al., arXiv:1607.06450.

    over: the dim that is normalised. plus_one: the weight is scale - 1 and starts at 0, as in Nemotron. bias: with
    False there is no shift.
    """

    eps: float = 1e-5
    over: str = field(default="embed", kw_only=True)
    plus_one: bool = field(default=False, kw_only=True)
    bias: bool = field(default=True, kw_only=True)

    def body(self, x: Value, /, **side: Value) -> Value:
        e = x[self.over]
        weights = [_scale(e, self.plus_one), *([weight("shift", e, std=0.0)] if self.bias else [])]
        return apply(Normalize((self.over,), True, self.eps), x, *weights)


def _scale(d: Dim, plus_one: bool = False) -> Value:
    return 1.0 + weight("scale", d, std=0.0) if plus_one else weight("scale", d, mean=1.0, std=0.0)
