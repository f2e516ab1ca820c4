"""The layers of hidden states, position by position. Each one is its mathematics, in named dims, and nothing else."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen

from megaloom.dsl.combine import Each
from megaloom.dsl.dims import Dim
from megaloom.dsl.errors import ShapeError
from megaloom.dsl.layer import Layer, is_layer
from megaloom.dsl.ops.linear import (
    Drop,
    Lookup,
    Normalize,
    Rows,
    dot,
    weight,
)
from megaloom.dsl.ops.routing import Combine, Gate, Route
from megaloom.dsl.ops.shape import Patches, Rename
from megaloom.dsl.value import (
    Clamp,
    Value,
    apply,
    fn,
)


@frozen
class RMSNorm(Layer):
    """x / sqrt(mean(x²) + eps) * scale, over embed. Source: Zhang & Sennrich, arXiv:1910.07467.

    over: the dim, if it is another. plus_one: the weight is the scale less 1, and starts at 0 (as in Gemma).
    """

    eps: float = 1e-5
    over: str = field(default="embed", kw_only=True)
    plus_one: bool = field(default=False, kw_only=True)

    def body(self, x: Value, /, **side: Value) -> Value:
        return apply(Normalize((self.over,), False, self.eps), x, scale(x[self.over], self.plus_one))


@frozen
class LayerNorm(Layer):
    """(x - mean(x)) / sqrt(var(x) + eps) * scale + shift, over embed. Source: Ba et al., arXiv:1607.06450.

    over: the dim, if it is another. plus_one: the weight is the scale less 1, and starts at 0 (as in Nemotron).
    bias: whether it shifts.
    """

    eps: float = 1e-5
    over: str = field(default="embed", kw_only=True)
    plus_one: bool = field(default=False, kw_only=True)
    bias: bool = field(default=True, kw_only=True)

    def body(self, x: Value, /, **side: Value) -> Value:
        e = x[self.over]
        weights = [scale(e, self.plus_one), *([weight("shift", e, std=0.0)] if self.bias else [])]
        return apply(Normalize((self.over,), True, self.eps), x, *weights)


def scale(d: Dim, plus_one: bool = False) -> Value:
    """A norm's weight for each index of a dim."""
    return 1.0 + weight("scale", d, std=0.0) if plus_one else weight("scale", d, mean=1.0, std=0.0)


@frozen
class Embed(Layer):
    """The row of a table [vocab embed] for each token: [batch seq] becomes [batch seq embed]."""

    table: Value

    def body(self, x: Value, /, **side: Value) -> Value:
        return apply(Lookup("vocab"), x, self.table)


@frozen
class PatchEmbed(Layer):
    """A vector for each square of `size` by `size` pixels of an image: [batch patches embed].

    Source: Dosovitskiy et al., arXiv:2010.11929.
    """

    size: int
    embed: Dim
    bias: bool = True

    def body(self, x: Value, /, **side: Value) -> Value:
        return project("patch", apply(Patches(self.size), x), self.embed, over=("pixels",), bias=self.bias)


@frozen
class Positions(Layer):
    """Add a learned vector for each position: row i + offset of a table [position embed] to position i."""

    table: Value
    offset: int = 0

    def body(self, x: Value, /, **side: Value) -> Value:
        return x + apply(Rows("position", self.offset), x, self.table)


@frozen
class Unembed(Layer):
    """The logits of each token over a table [vocab embed]. The table of `Embed` again ties the two."""

    table: Value
    bias: bool = False

    def body(self, x: Value, /, **side: Value) -> Value:
        y = dot(x, self.table, "embed")
        return y + weight("bias", self.table["vocab"], std=0.0) if self.bias else y


@frozen
class Scale(Layer):
    """factor * x."""

    factor: float

    def body(self, x: Value, /, **side: Value) -> Value:
        return self.factor * x


@frozen
class Softcap(Layer):
    """cap * tanh(x / cap): nothing larger than cap. Source: Gemma 2, arXiv:2408.00118."""

    cap: float

    def __attrs_post_init__(self) -> None:
        if self.cap <= 0:
            raise ShapeError(f"nothing can be capped at {self.cap}: cap must be more than 0")

    def body(self, x: Value, /, **side: Value) -> Value:
        return self.cap * fn("tanh", x * (1 / self.cap))


@frozen
class Dropout(Layer):
    """Zero each element with this probability, while training."""

    rate: float

    def __attrs_post_init__(self) -> None:
        probability("a dropout rate", self.rate)

    def body(self, x: Value, /, **side: Value) -> Value:
        return apply(Drop(self.rate), x)


@frozen
class Linear(Layer):
    """x times a matrix, into another embed."""

    embed: Dim
    bias: bool = False

    def body(self, x: Value, /, **side: Value) -> Value:
        e, out = x["embed"], Dim("out", self.embed.known)
        y = dot(x, weight("weight", e, out), "embed")
        y = y + weight("bias", out, std=0.0) if self.bias else y
        return apply(Rename("out", "embed"), y)


@frozen
class Activation(Layer):
    """A function of each element by itself."""

    act: str

    def body(self, x: Value, /, **side: Value) -> Value:
        return fn(self.act, x)


@frozen
class MLP(Layer):
    """down(act(up(x))), with ff channels between. `act` is any function of one value: gelu, relu, relu2, silu, …"""

    ff: int
    act: str = "gelu"
    bias: bool = False

    def body(self, x: Value, /, **side: Value) -> Value:
        e, f = x["embed"], Dim("ff", self.ff)
        h = fn(self.act, project("up", x, f, bias=self.bias))
        return project("down", h, e, over=("ff",), bias=self.bias)


@frozen
class SwiGLU(Layer):
    """down(silu(gate(x)) * up(x)), with ff channels between. Source: Shazeer, arXiv:2002.05202."""

    ff: int

    def body(self, x: Value, /, **side: Value) -> Value:
        return gated("silu", x, self.ff)


@frozen
class GeGLU(Layer):
    """down(gelu(gate(x)) * up(x)), with ff channels between. Source: Shazeer, arXiv:2002.05202."""

    ff: int
    act: str = "gelu_tanh"

    def body(self, x: Value, /, **side: Value) -> Value:
        return gated(self.act, x, self.ff)


@frozen
class ClampedGLU(Layer):
    """down(g sigmoid(1.702 g) (u + 1)) of a gate g and a product u, clamped to `limit`, all with biases.

    Source: GPT-OSS, arXiv:2508.10925.
    """

    ff: int
    limit: float = 7.0

    def body(self, x: Value, /, **side: Value) -> Value:
        e, f = x["embed"], Dim("ff", self.ff)
        g = apply(Clamp(None, self.limit), project("gate", x, f, bias=True))
        u = apply(Clamp(-self.limit, self.limit), project("up", x, f, bias=True))
        h = g * fn("sigmoid", 1.702 * g) * (u + 1.0)
        return project("down", h, e, over=("ff",), bias=True)


def gated(act: str, x: Value, ff: int) -> Value:
    """down(act(gate(x)) * up(x))."""
    e, f = x["embed"], Dim("ff", ff)
    return project("down", fn(act, project("gate", x, f)) * project("up", x, f), e, over=("ff",))


def project(name: str, x: Value, *dims: Dim, over: tuple[str, ...] = ("embed",), bias: bool = False) -> Value:
    """x times a matrix from embed, or the dims `over`, to these dims, and with a bias if there is one."""
    y = dot(x, weight(name, *(x[d] for d in over), *dims), *over)
    return y + weight(f"{name}_bias", *dims, std=0.0) if bias else y


@frozen
class MoE(Layer):
    """Each token goes to its top_k experts; their results are added, weighted as `Gate` says of score to best.

    By default by a softmax over the chosen scores. bias: of the router. corrected: a buffer is added to the scores to
    choose by, which training moves to balance the load (DeepSeek-V3, arXiv:2412.19437). shared: a layer that every
    token goes through as well. balance: the weight of the load-balancing loss that training adds (Fedus et al.,
    arXiv:2101.03961); the layer's output does not depend on it.
    """

    expert: Layer = field(validator=is_layer)
    experts: int
    top_k: int
    balance: float = 0.0
    shared: Layer | None = field(default=None, validator=is_layer, kw_only=True)
    score: Literal["softmax", "sigmoid"] = field(default="softmax", kw_only=True)
    normalize: bool = field(default=True, kw_only=True)
    scale: float = field(default=1.0, kw_only=True)
    groups: int = field(default=1, kw_only=True)
    top_groups: int = field(default=1, kw_only=True)
    best: int = field(default=2, kw_only=True)
    corrected: bool = field(default=False, kw_only=True)
    bias: bool = field(default=False, kw_only=True)

    @property
    def gate(self) -> Gate:
        """How a token's experts are chosen and weighted."""
        return Gate(
            self.top_k,
            score=self.score,
            normalize=self.normalize,
            scale=self.scale,
            groups=self.groups,
            top_groups=self.top_groups,
            best=self.best,
            corrected=self.corrected,
        )

    def body(self, x: Value, /, **side: Value) -> Value:
        n = Dim("experts", self.experts)
        scores = project("router", x, n, bias=self.bias)
        correction = [weight("correction", n, std=0.0, trained=False)] if self.corrected else []
        gate = apply(self.gate, scores, *correction)
        y = apply(Combine(), apply(Route(self.top_k), x, gate) >> Each("experts", self.expert), gate)
        return y + (x >> self.shared.named("shared")) if self.shared else y


def probability(what: str, p: float) -> None:
    """Check that p can be a dropout probability."""
    if not 0 <= p < 1:
        raise ShapeError(f"{what} of {p} is no probability: it takes 0 up to (not including) 1")
