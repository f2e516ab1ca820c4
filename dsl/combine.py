"""Combinators: layers made of layers. All but `Each` are transparent to the graph. `repeat` has its own module."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from megaloom.dsl.ops.shape import Select

from .dims import Shape
from .errors import ShapeError
from .layer import Layer, chain, is_layer
from .value import Value, apply, fn


@frozen
class Residual(Layer):
    """x + inner(x). Raises ShapeError if inner changes the shape."""

    inner: Layer
    transparent: ClassVar[bool] = True

    def body(self, x: Value, /, **side: Value) -> Value:
        y = self.inner(x, **side)
        if y.shape != x.shape:
            raise ShapeError(f"a residual must keep the shape, but {x.shape} becomes {y.shape}")
        return x + y

    def __str__(self) -> str:
        return "residual"


@frozen
class Parallel(Layer):
    """The sum of several layers of one input: f(x) + g(x). Raises ShapeError if their results differ in shape.

    Source: Wang & Komatsuzaki, GPT-J, 2021, whose attention and feed-forward layer read the same norm.
    """

    layers: tuple[Layer, ...]
    transparent: ClassVar[bool] = True

    def body(self, x: Value, /, **side: Value) -> Value:
        first, *others = [layer(x, **side) for layer in self.layers]
        for y in others:
            if y.shape != first.shape:
                raise ShapeError(f"layers side by side must have results of one shape, got {first.shape} and {y.shape}")
        return fn("add", first, *others)

    def __str__(self) -> str:
        return "parallel"


@frozen
class Block(Layer):
    """One iteration of a repeat: the unit of full recompute."""

    inner: Layer
    transparent: ClassVar[bool] = True
    named_in_errors: ClassVar[bool] = False

    def body(self, x: Value, /, **side: Value) -> Value:
        return self.inner(x, **side)


@frozen
class Each(Layer):
    """One copy of a layer for each index of a dim, each with its own weights: [dim ..] to [dim ..]."""

    dim: str
    inner: Layer

    def body(self, x: Value, /, **side: Value) -> Value:
        return self.inner(apply(Select(self.dim), x), **side)

    def __call__(self, x: Value, /, **side: Value) -> Value:
        one = self.body(x, **side)
        return Value(self, (x, *self.other_inputs(one, x, side)), Shape((x[self.dim], *one.shape)), one, at=self.at)

    def __str__(self) -> str:
        return f"each of {self.dim}"


def residual(*layers: Layer) -> Layer:
    """Return a layer that computes x + f(x), where f applies these layers in order."""
    return Residual(chain(*layers))


def parallel(*layers: Layer) -> Layer:
    """Return a layer that computes f(x) + g(x) + …: each of these layers reads x."""
    if not layers:
        raise ShapeError("give at least one layer")
    for layer in layers:
        is_layer(None, None, layer)
    return layers[0] if len(layers) == 1 else Parallel(layers)
