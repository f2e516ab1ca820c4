"""Layers are values too: a frozen function from values to a value, written as its mathematics."""

from __future__ import annotations

import re
from typing import ClassVar

from attrs import NOTHING, field, fields, frozen

from .errors import ShapeError, caller, located
from .value import Op, Value, no_layer


@frozen
class Layer(Op):
    """A function from values to a value, written with named dims in one method, `body`.

    A layer says only what it computes. Its shape, parameters, FLOPs, saved activations and the ways
    it can be split are all read off its body. Subclasses are `@frozen` attrs classes.
    """

    at: str = field(factory=caller, kw_only=True, eq=False, repr=False)  # where it was written
    transparent: ClassVar[bool] = False  # combinators are: the graph looks through them
    noted: ClassVar[bool] = True  # whether an error inside names this layer
    splits: ClassVar[dict[str, str]] = {}  # its own dims that may be divided, and on which axis: see dsl.splits

    def body(self, x: Value, /, **side: Value) -> Value:
        """The layer's mathematics: its output for the input x and the side inputs, by name."""
        raise ShapeError(f"{type(self).__name__} has no body: write its mathematics as body(self, x, /, **side)")

    def __call__(self, x: Value, /, **side: Value) -> Value:
        try:
            out = self.body(x, **side)
            if not isinstance(out, Value):
                raise ShapeError(f"the body of {type(self).__name__} must return a value, not {out!r}")
        except ShapeError as error:
            if not error.noted and error.at != caller():  # a line of the user's own body
                located(error, f"body of {type(self).__name__}", error.at)
            if self.noted:
                located(error, str(self), self.at)
            raise
        return Value(self, (x, *side.values()), out.shape, out, dtype=out.dtype, at=caller())

    def __rshift__(self, after: Layer) -> Layer:
        return chain(self, after)

    def given(self, **side: Value) -> Layer:
        """This layer with side inputs that every layer inside it can read by name."""
        return Given(self, side)

    def __str__(self) -> str:
        said = (
            (f.name, getattr(self, f.name))
            for f in fields(type(self))
            if f.repr and (f.default is NOTHING or getattr(self, f.name) != f.default)
        )
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in said)})"


@frozen
class Chain(Layer):
    """One layer after another."""

    layers: tuple[Layer, ...]
    transparent: ClassVar[bool] = True
    noted: ClassVar[bool] = False

    def body(self, x: Value, /, **side: Value) -> Value:
        for layer in self.layers:
            x = layer(x, **side)
        return x


@frozen
class Given(Layer):
    """A layer with side inputs, by name."""

    inner: Layer
    side: dict[str, Value] = field(hash=False)
    transparent: ClassVar[bool] = True
    noted: ClassVar[bool] = False

    def body(self, x: Value, /, **side: Value) -> Value:
        return self.inner(x, **{**side, **self.side})


def chain(*layers: Layer) -> Layer:
    """These layers, one after another; chains inside are spliced in, so that `>>` is associative."""
    for layer in layers:
        if not isinstance(layer, Layer):
            raise no_layer(layer)
    flat = tuple(part for layer in layers for part in (layer.layers if isinstance(layer, Chain) else (layer,)))
    if not flat:
        raise ShapeError("a combinator needs at least one layer")
    return flat[0] if len(flat) == 1 else Chain(flat)


def kind(op: Op) -> str:
    """The name of an op's kind in snake case: RMSNorm is rms_norm, SwiGLU is swiglu."""
    said = getattr(op, "fn", None) or getattr(op, "name", None)
    if isinstance(said, str):
        return said
    name = type(op).__name__
    return re.sub(r"(?<=[A-Z])(?=[A-Z][a-z])|(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name).lower()
