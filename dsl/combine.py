"""Combinators: layers made of layers. All but `Each` are transparent to the graph."""

from __future__ import annotations

from typing import ClassVar

from attrs import field, frozen

from megaloom.dsl.ops.shape import Select

from .dims import Shape
from .errors import ShapeError
from .layer import Layer, chain
from .value import Value, apply


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
class Block(Layer):
    """One iteration of a repeat: the unit of full recompute."""

    inner: Layer
    transparent: ClassVar[bool] = True
    named_in_errors: ClassVar[bool] = False

    def body(self, x: Value, /, **side: Value) -> Value:
        return self.inner(x, **side)


@frozen
class Repeat(Layer):
    """A layer applied `times` times, each time with its own weights. Raises ShapeError if it changes the shape."""

    times: int = field()
    inner: Layer
    transparent: ClassVar[bool] = True

    @times.validator
    def _at_least_once(self, _: object, times: int) -> None:
        if isinstance(times, bool) or not isinstance(times, int) or times < 1:
            raise ShapeError(f"repeat needs a whole number of times, at least 1, got {times!r}")

    def body(self, x: Value, /, **side: Value) -> Value:
        for _ in range(self.times):
            y = Block(self.inner, at=self.at)(x, **side)
            if y.shape != x.shape:
                raise ShapeError(f"a repeated layer must keep the shape, but {x.shape} becomes {y.shape}")
            x = y
        return x

    def __str__(self) -> str:
        return f"repeat({self.times})"


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


def repeat(times: int, *layers: Layer) -> Layer:
    """Return a layer that applies the chain of these layers `times` times, each time with its own weights.

    Each iteration is a block: the unit of full recompute.
    """
    return Repeat(times, chain(*layers))
