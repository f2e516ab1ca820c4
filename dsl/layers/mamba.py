"""Mamba-2: a selective state space with a causal convolution, a gate and a norm."""

from __future__ import annotations

from attrs import frozen

from megaloom.dsl.dims import Dim
from megaloom.dsl.layer import Layer
from megaloom.dsl.ops.norm import Normalize
from megaloom.dsl.ops.sequence import Conv, Scan
from megaloom.dsl.ops.weight import weight
from megaloom.dsl.value import (
    Clamp,
    Value,
    apply,
    fn,
)

from .linear import project


@frozen(kw_only=True)
class Mamba2(Layer):
    """Mamba-2: a selective state space with `state` numbers per channel, heads * head_dim channels.

    groups: groups of heads that share the inputs b and the outputs c of the state. conv: the width of the causal
    convolution before the scan. conv_bias: whether the convolution has a bias. bias: of the projections. norm_groups:
    the gated output is normalised in this many groups. dt: the smallest and the largest step; None is no bound.
    Source: Dao & Gu, arXiv:2405.21060.
    """

    heads: int
    head_dim: int
    state: int
    groups: int = 1
    conv: int = 4
    conv_bias: bool = True
    bias: bool = False
    norm_groups: int = 1
    eps: float = 1e-5
    dt: tuple[float | None, float | None] | None = None

    def body(self, x: Value, /, **side: Value) -> Value:
        e, h, c = x["embed"], Dim("heads", self.heads), Dim("head_dim", self.head_dim)
        g, n = Dim("groups", self.groups), Dim("state", self.state)
        z = project("z", x, h, c, bias=self.bias)
        u, b, out = (self._convolved(name, x, *dims) for name, dims in (("x", (h, c)), ("b", (g, n)), ("c", (g, n))))
        dt = fn("softplus", project("dt", x, h, bias=self.bias) + weight("dt_shift", h))
        dt = apply(Clamp(*self.dt), dt) if self.dt else dt
        a = -1.0 * fn("exp", weight("a_log", h))
        y = apply(Scan(), u, dt, a, b, out) + u * weight("skip", h, mean=1.0, std=0.0)
        y = fn("mul", y, fn("silu", z), fusion="gate")
        norm = Normalize(("heads", "head_dim"), False, self.eps, self.norm_groups)
        y = apply(norm, y, weight("scale", h, c, mean=1.0, std=0.0))
        return project("o", y, e, over=("heads", "head_dim"), bias=self.bias)

    def _convolved(self, name: str, x: Value, *dims: Dim) -> Value:
        kernel = weight(f"{name}_conv", *dims, Dim("width", self.conv))
        y = apply(Conv(), project(name, x, *dims, bias=self.bias), kernel)
        return fn("silu", y + weight(f"{name}_conv_bias", *dims, std=0.0) if self.conv_bias else y)
