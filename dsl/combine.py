"""Combinators: layers made of layers. The graph looks through all but `Each`."""

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
    """x + inner(x). Raises ShapeError when inner gives another shape."""

    inner: Layer
    transparent: ClassVar[bool] = True

    def body(self, x: Value, /, **side: Value) -> Value:
        y = self.inner(x, **side)
        if y.shape != x.shape:
            raise ShapeError(f"a residual needs its input's shape back, but {x.shape} becomes {y.shape}")
        return x + y

    def __str__(self) -> str:
        return "residual"


@frozen
class Block(Layer):
    """One iteration of a repeat: what full recompute computes again as a whole."""

    inner: Layer
    transparent: ClassVar[bool] = True
    noted: ClassVar[bool] = False

    def body(self, x: Value, /, **side: Value) -> Value:
        return self.inner(x, **side)


@frozen
class Repeat(Layer):
    """The same layers again and again, each time with weights of their own. Raises ShapeError if the shape changes."""

    times: int = field()
    inner: Layer
    transparent: ClassVar[bool] = True

    @times.validator
    def _at_least_once(self, _: object, times: int) -> None:
        if isinstance(times, bool) or not isinstance(times, int) or times < 1:
            raise ShapeError(f"cannot repeat a layer {times!r} times: it takes a whole number of at least 1")

    def body(self, x: Value, /, **side: Value) -> Value:
        for _ in range(self.times):
            y = Block(self.inner, at=self.at)(x, **side)
            if y.shape != x.shape:
                raise ShapeError(f"a repeat needs its input's shape back, but {x.shape} becomes {y.shape}")
            x = y
        return x

    def __str__(self) -> str:
        return f"repeat({self.times})"


@frozen
class Each(Layer):
    """One copy of a layer for every index of a dim, each with weights of its own: [dim ..] to [dim ..]."""

    dim: str
    inner: Layer

    def body(self, x: Value, /, **side: Value) -> Value:
        return self.inner(apply(Select(self.dim), x), **side)

    def __call__(self, x: Value, /, **side: Value) -> Value:
        one = self.body(x, **side)
        return Value(self, (x, *self.read(one, x, side)), Shape((x[self.dim], *one.shape)), one, at=self.at)

    def __str__(self) -> str:
        return f"each of {self.dim}"


def residual(*layers: Layer) -> Layer:
    """x + layers(x), of the layers one after another."""
    return Residual(chain(*layers))


def repeat(times: int, *layers: Layer) -> Layer:
    """The chain of these layers, `times` times over, each time with weights of its own.

    Its facts are `times` those of the chain. Each iteration is a block, which full recompute makes again as a whole.
    """
    return Repeat(times, chain(*layers))
