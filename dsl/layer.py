"""Layers are values too: a frozen function from values to a value, written as its mathematics."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from functools import cache
from inspect import signature
from typing import Any, ClassVar, Self

from attrs import NOTHING, field, fields, frozen

from megaloom.dsl.ops.weight import Weight

from .errors import (
    ShapeError,
    caller,
    located,
)
from .sharding_table import Sharded, check_splits
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
    splits: ClassVar[Mapping[str, str | Sharded]] = {}  # its own dims that an axis may shard: see dsl.sharding_table

    def __init_subclass__(cls) -> None:
        check_splits(cls.__name__, cls.splits)

    def __new__(cls, *_: Any, **__: Any) -> Self:
        said = (str(a) for a in vars(cls).get("__annotations__", {}).values())
        if "__attrs_attrs__" not in vars(cls) and not all(a.startswith(("ClassVar", "typing.ClassVar")) for a in said):
            raise ShapeError(f"{cls.__name__} has fields, but is no attrs class: write @frozen above it (of attrs)")
        return object.__new__(cls)

    def body(self, x: Value, /, *_: Any, **side: Any) -> Value:
        """The layer's mathematics: its output for the input x and the side inputs, by name.

        A side input that it names, `body(self, x, /, memory, **side)`, it needs.
        """
        raise ShapeError(f"{type(self).__name__} has no body: write its mathematics as body(self, x, /, **side)")

    def __call__(self, x: Value, /, **side: Value) -> Value:
        try:
            for name in sorted(_wanted(type(self).body) - side.keys()):
                only = f", only {', '.join(side)}" if side else ""
                raise ShapeError(f"the side input {name!r} is not given{only}: give it, layer.given({name}=value)")
            out = self.body(x, **side)
            if not isinstance(out, Value):
                raise ShapeError(f"the body of {type(self).__name__} must return a value, not {out!r}")
        except ShapeError as error:
            if not error.noted and error.at != caller():  # a line of the user's own body
                located(error, f"body of {type(self).__name__}", error.at)
            if self.noted:
                located(error, str(self), self.at)
            raise
        return Value(self, (x, *self.read(out, x, side)), out.shape, out, dtype=out.dtype, at=caller())

    def read(self, out: Value, x: Value, side: Mapping[str, Value]) -> tuple[Value, ...]:
        """What the body reads beside x and weights: side inputs, and values that the layer was made with."""
        if self.transparent:
            return tuple(side.values())
        outside = {id(v): v for v in (*side.values(), *held(self)) if not isinstance(v.op, Weight)}
        return tuple(v for i, v in outside.items() if i in _reached(out, x, outside)) if outside else ()

    def named(self, name: str) -> Layer:
        """This layer inside another's body, where its weights are called `name.…`."""
        return Named(name, self)

    def __rshift__(self, after: Layer) -> Layer:
        return chain(self, after)

    def given(self, **side: Value) -> Layer:
        """This layer with side inputs that every layer inside it can read by name."""
        for name, value in side.items():
            if not isinstance(value, Value):
                raise ShapeError(f"{value!r} is no value, so it cannot be the side input {name!r}")
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
    """One layer after another: c(b(a(x)))."""

    layers: tuple[Layer, ...]
    transparent: ClassVar[bool] = True
    noted: ClassVar[bool] = False

    def body(self, x: Value, /, **side: Value) -> Value:
        for layer in self.layers:
            x = layer(x, **side)
        return x


@frozen
class Given(Layer):
    """A layer with side inputs, which every layer inside it can read by name."""

    inner: Layer
    side: dict[str, Value] = field(hash=False)
    transparent: ClassVar[bool] = True
    noted: ClassVar[bool] = False

    def body(self, x: Value, /, **side: Value) -> Value:
        return self.inner(x, **{**side, **self.side})


@frozen
class Named(Layer):
    """A layer whose weights, inside another's body, have a name of its own before theirs."""

    name: str
    inner: Layer
    transparent: ClassVar[bool] = True
    noted: ClassVar[bool] = False

    def body(self, x: Value, /, **side: Value) -> Value:
        return self.inner(x, **side)


def is_layer(_: object, __: object, it: Any) -> None:
    """Check, as a validator of attrs, that a field is a layer (or None where there is none)."""
    if it is not None and not isinstance(it, Layer):
        raise no_layer(it)


def chain(*layers: Layer) -> Layer:
    """These layers, one after another; chains inside are spliced in, so that `>>` is associative."""
    for layer in layers:
        is_layer(None, None, layer)
    flat = tuple(part for layer in layers for part in (layer.layers if isinstance(layer, Chain) else (layer,)))
    if not flat:
        raise ShapeError("a combinator needs at least one layer")
    return flat[0] if len(flat) == 1 else Chain(flat)


def held(it: object) -> Iterator[Value]:
    """The values that a layer, or a layer within it, was given when it was made."""
    if isinstance(it, Value):
        yield it
    elif isinstance(it, Layer):
        for f in fields(type(it)):
            yield from held(getattr(it, f.name))
    elif isinstance(it, tuple):
        for part in it:
            yield from held(part)
    elif isinstance(it, dict):
        yield from held(tuple(it.values()))


@cache
def _wanted(body: Callable[..., Value]) -> frozenset[str]:
    """The side inputs without which a layer has no meaning: what its body has no default for."""
    _, _, *side = signature(body).parameters.values()
    return frozenset(p.name for p in side if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))


def _reached(out: Value, x: Value, outside: Container[int]) -> set[int]:
    """Which of these values (by identity) a body's output is computed from, not through x."""
    found, seen, todo = set(), {id(x)}, [out]
    while todo:
        v = todo.pop()
        if id(v) in seen:
            continue
        seen.add(id(v))
        if id(v) in outside:
            found.add(id(v))
        elif v.body is not None and isinstance(v.op, Layer) and v.op.transparent:
            todo.append(v.body)
        else:
            todo += v.args
    return found


def kind(op: Op) -> str:
    """The name of an op's kind in snake case: RMSNorm is rms_norm, SwiGLU is swiglu."""
    said = getattr(op, "fn", None) or getattr(op, "name", None)
    if isinstance(said, str):
        return said
    name = type(op).__name__
    return re.sub(r"(?<=[A-Z])(?=[A-Z][a-z])|(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name).lower()
