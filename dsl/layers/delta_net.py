"""Gated DeltaNet: linear attention by the gated delta rule, with convolutions, a norm and a gate."""

from __future__ import annotations

from math import sqrt

from attrs import frozen

from megaloom.dsl.dims import Dim
from megaloom.dsl.layer import Layer
from megaloom.dsl.ops.delta_rule import DeltaRule
from megaloom.dsl.ops.norm import Normalize
from megaloom.dsl.ops.sequence import Conv
from megaloom.dsl.ops.weight import weight
from megaloom.dsl.value import Value, apply, fn

from .linear import project

UNIT_EPS = 1e-6  # added to the squared length of queries and keys (transformers, modeling_qwen3_next.py: l2norm)
# A logarithm of uniform numbers between 0 and 16 has this mean, and a standard deviation of 1.
LOG_DECAY = 1.77


@frozen(kw_only=True)
class GatedDeltaNet(Layer):
    """Linear attention by the gated delta rule: `heads` heads of head_dim values, `groups` of keys and queries.

    state: the length of a key. conv: the width of the causal convolutions of queries, keys and values. Queries and keys
    have the length 1. Each head's output is normalised, then gated. Source: Yang et al., arXiv:2412.06464, as in
    Qwen3-Next.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int = 4
    eps: float = 1e-6

    def body(self, x: Value, /, **side: Value) -> Value:
        e, h, c = x["embed"], Dim("heads", self.heads), Dim("head_dim", self.head_dim)
        g, n = Dim("groups", self.groups), Dim("state", self.state)
        q, k = self._unit(self._convolved("q", x, g, n)), self._unit(self._convolved("k", x, g, n))
        v, z = self._convolved("v", x, h, c), project("z", x, h, c)
        beta = fn("sigmoid", project("beta", x, h))
        dt = fn("softplus", project("dt", x, h) + weight("dt_shift", h, mean=1.0, std=0.0))
        decay = dt * (-1.0 * fn("exp", weight("a_log", h, mean=LOG_DECAY, std=1.0)))
        y = apply(DeltaRule(), v, decay, beta, k, q * (1 / sqrt(self.state)))
        y = apply(Normalize(("head_dim",), False, self.eps), y, weight("scale", c, mean=1.0, std=0.0))
        return project("o", fn("mul", y, fn("silu", z), fusion="gate"), e, over=("heads", "head_dim"))

    def _convolved(self, name: str, x: Value, *dims: Dim) -> Value:
        kernel = weight(f"{name}_conv", *dims, Dim("width", self.conv))
        return fn("silu", apply(Conv(), project(name, x, *dims), kernel))

    def _unit(self, x: Value) -> Value:
        """Return queries or keys, each divided by its length."""
        return apply(Normalize(("state",), False, UNIT_EPS / self.state), x) * (1 / sqrt(self.state))
