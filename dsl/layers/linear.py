"""Linear projections, and layers that act on each element."""

from __future__ import annotations

from attrs import field, frozen

from megaloom.dsl.dims import Dim
from megaloom.dsl.errors import ShapeError
from megaloom.dsl.layer import Layer, is_layer
from megaloom.dsl.ops.dot import dot
from megaloom.dsl.ops.norm import Drop
from megaloom.dsl.ops.shape import Rename
from megaloom.dsl.ops.weight import weight
from megaloom.dsl.value import Value, apply, fn


@frozen
class Linear(Layer):
    """x times a matrix, plus a bias if there is one: [.. embed] to [.. embed] of another size."""

    embed: Dim
    bias: bool = False

    def body(self, x: Value, /, **side: Value) -> Value:
        e, out = x["embed"], Dim("out", self.embed.known)
        y = dot(x, weight("weight", e, out), "embed")
        y = y + weight("bias", out, std=0.0) if self.bias else y
        return apply(Rename("out", "embed"), y)


@frozen
class Activation(Layer):
    """An activation function of each element: gelu, relu, silu, … (see `fn`)."""

    act: str

    def body(self, x: Value, /, **side: Value) -> Value:
        return fn(self.act, x)


@frozen
class Scale(Layer):
    """factor * x."""

    factor: float

    def body(self, x: Value, /, **side: Value) -> Value:
        return self.factor * x


@frozen
class Softcap(Layer):
    """cap * tanh(x / cap), which lies between -cap and cap. Source: Gemma 2, arXiv:2408.00118."""

    cap: float

    def __attrs_post_init__(self) -> None:
        if self.cap <= 0:
            raise ShapeError(f"cap must be more than 0, got {self.cap}")

    def body(self, x: Value, /, **side: Value) -> Value:
        return self.cap * fn("tanh", x * (1 / self.cap))


@frozen
class Dropout(Layer):
    """In training, zero each element with probability `rate`."""

    rate: float

    def __attrs_post_init__(self) -> None:
        check_probability("dropout rate", self.rate)

    def body(self, x: Value, /, **side: Value) -> Value:
        return apply(Drop(self.rate), x)


@frozen
class SigmoidGated(Layer):
    """A layer whose output is multiplied by the sigmoid of one number for each token, a projection of x.

    Source: Qwen1.5-MoE's shared expert (Qwen team, 2024).
    """

    inner: Layer = field(validator=is_layer)

    def body(self, x: Value, /, **side: Value) -> Value:
        return self.inner(x, **side) * fn("sigmoid", dot(x, weight("token_gate", x["embed"]), "embed"))


def project(name: str, x: Value, *dims: Dim, over: tuple[str, ...] = ("embed",), bias: bool = False) -> Value:
    """Return x times the weight `name`, [.. over] to [.. dims], plus the weight `name_bias` if there is a bias."""
    y = dot(x, weight(name, *(x[d] for d in over), *dims), *over)
    return fn("add", y, weight(f"{name}_bias", *dims, std=0.0), fusion="bias") if bias else y


def dropped(x: Value, rate: float) -> Value:
    """Return x after dropout, or x itself if the rate is 0."""
    return apply(Drop(rate), x) if rate else x


def check_probability(name: str, p: float) -> None:
    """Raise ShapeError if p is not a dropout probability, 0 ≤ p < 1."""
    if not 0 <= p < 1:
        raise ShapeError(f"{name} must be at least 0 and below 1, got {p}")
