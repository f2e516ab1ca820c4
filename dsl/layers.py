"""The layers. Each one is its mathematics, in named dims, and nothing else."""

from __future__ import annotations

from attrs import frozen

from .combine import Each
from .dims import Dim
from .errors import ShapeError
from .layer import Layer
from .ops import Attend, Combine, Drop, Gate, Lookup, Normalize, Rope, Route, Rows, dot, weight
from .value import Value, apply, fn


@frozen
class RMSNorm(Layer):
    """x / sqrt(mean(x²) + eps) * scale, over embed. Source: Zhang & Sennrich, arXiv:1910.07467."""

    eps: float = 1e-5

    def body(self, x: Value, /, **side: Value) -> Value:
        scale = weight("scale", x["embed"], mean=1.0, std=0.0)
        return apply(Normalize("embed", False, self.eps), x, scale)


@frozen
class LayerNorm(Layer):
    """(x - mean(x)) / sqrt(var(x) + eps) * scale + shift, over embed. Source: Ba et al., arXiv:1607.06450."""

    eps: float = 1e-5

    def body(self, x: Value, /, **side: Value) -> Value:
        e = x["embed"]
        scale, shift = weight("scale", e, mean=1.0, std=0.0), weight("shift", e, std=0.0)
        return apply(Normalize("embed", True, self.eps), x, scale, shift)


@frozen
class Embed(Layer):
    """The row of a table [vocab embed] for each token: [batch seq] becomes [batch seq embed]."""

    table: Value

    def body(self, x: Value, /, **side: Value) -> Value:
        return apply(Lookup("vocab"), x, self.table)


@frozen
class Positions(Layer):
    """Add a learned vector for each position: row i of a table [position embed] to position i."""

    table: Value

    def body(self, x: Value, /, **side: Value) -> Value:
        return x + apply(Rows("position"), x, self.table)


@frozen
class Unembed(Layer):
    """The logits of each token over a table [vocab embed]. The table of `Embed` again ties the two."""

    table: Value

    def body(self, x: Value, /, **side: Value) -> Value:
        return dot(x, self.table, "embed")


@frozen
class Dropout(Layer):
    """Zero each element with this probability, while training."""

    rate: float

    def __attrs_post_init__(self) -> None:
        probability("a dropout rate", self.rate)

    def body(self, x: Value, /, **side: Value) -> Value:
        return apply(Drop(self.rate), x)


@frozen
class MLP(Layer):
    """down(act(up(x))), with ff channels between. `act` is gelu, gelu_tanh, silu or relu."""

    ff: int
    act: str = "gelu"
    bias: bool = False

    def body(self, x: Value, /, **side: Value) -> Value:
        e, f = x["embed"], Dim("ff", self.ff)
        h = dot(x, weight("up", e, f), "embed")
        h = h + weight("up_bias", f, std=0.0) if self.bias else h
        y = dot(fn(self.act, h), weight("down", f, e), "ff")
        return y + weight("down_bias", e, std=0.0) if self.bias else y


@frozen
class SwiGLU(Layer):
    """down(silu(gate(x)) * up(x)), with ff channels between. Source: Shazeer, arXiv:2002.05202."""

    ff: int

    def body(self, x: Value, /, **side: Value) -> Value:
        e, f = x["embed"], Dim("ff", self.ff)
        h = fn("silu", dot(x, weight("gate", e, f), "embed")) * dot(x, weight("up", e, f), "embed")
        return dot(h, weight("down", f, e), "ff")


@frozen(kw_only=True)
class Attention(Layer):
    """Multi-head self-attention; with fewer kv_heads than heads, grouped (Ainslie et al., arXiv:2305.13245).

    rope: the base of rotary positions (none when None). bias: on all four projections.
    dropout: of the attention probabilities.
    """

    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    causal: bool = True
    rope: float | None = None
    bias: bool = False
    dropout: float = 0.0

    def __attrs_post_init__(self) -> None:
        probability("an attention dropout", self.dropout)

    def body(self, x: Value, /, **side: Value) -> Value:
        e, h = x["embed"], Dim("heads", self.heads)
        g = Dim("kv_heads", self.heads if self.kv_heads is None else self.kv_heads)
        c = Dim("head_dim", share(e, h) if self.head_dim is None else self.head_dim)
        q = self._project("q", x, h, c)
        k = self._project("k", x, g, c)
        v = self._project("v", x, g, c)
        if self.rope is not None:
            q, k = apply(Rope(self.rope), q), apply(Rope(self.rope), k)
        o = apply(Attend(self.causal, self.dropout), q, k, v)
        y = dot(o, weight("o", h, c, e), "heads", "head_dim")
        return y + weight("o_bias", e, std=0.0) if self.bias else y

    def _project(self, name: str, x: Value, heads: Dim, head_dim: Dim) -> Value:
        y = dot(x, weight(name, x["embed"], heads, head_dim), "embed")
        return y + weight(name + "_bias", heads, head_dim, std=0.0) if self.bias else y


@frozen
class MoE(Layer):
    """Each token goes to its top_k experts; their results are added, weighted by a softmax over the chosen scores.

    balance: the weight of the load-balancing loss that training adds (Fedus et al., arXiv:2101.03961); the
    layer's output does not depend on it.
    """

    expert: Layer
    experts: int
    top_k: int
    balance: float = 0.0

    def body(self, x: Value, /, **side: Value) -> Value:
        scores = dot(x, weight("router", x["embed"], Dim("experts", self.experts)), "embed")
        gate = apply(Gate(self.top_k), scores)
        return apply(Combine(), apply(Route(self.top_k), x, gate) >> Each("experts", self.expert), gate)


def share(embed: Dim, heads: Dim) -> int:
    """The channels of each head when the heads share embed evenly."""
    if embed.known % heads.known:
        raise ShapeError(f"{embed} does not divide into {heads}: give head_dim, or heads that divide {embed.known}")
    return embed.known // heads.known


def probability(what: str, p: float) -> None:
    """Check that p can be a dropout probability."""
    if not 0 <= p < 1:
        raise ShapeError(f"{what} of {p} is no probability: it takes 0 up to (not including) 1")
