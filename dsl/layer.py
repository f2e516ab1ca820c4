"""The base class of layers, and the combinators that chain, name and feed them."""

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
    add_location,
    caller,
    did_you_mean,
    safe_repr,
)
from .field_types import check_fields
from .op import Op
from .sharding_table import Sharded, check_splits
from .value import Value, not_a_layer


@frozen
class Layer(Op):
    """A function from values to a value, written with named dims in one method, `body`.

    Shapes, parameters, FLOPs, saved activations and shardings are derived from the body. Subclasses are `@frozen` attrs
    classes.
    """

    at: str = field(factory=caller, kw_only=True, eq=False, repr=False)  # file:line of the program
    base_class: ClassVar[bool] = True  # its body states what an op would
    transparent: ClassVar[bool] = False  # True: the layers in its body become nodes of the graph, as for combinators
    named_in_errors: ClassVar[bool] = True  # True: an error in its body names this layer
    splits: ClassVar[Mapping[str, str | Sharded]] = {}  # its own dims that an axis may shard: see dsl.sharding_table

    def __init_subclass__(cls) -> None:
        check_splits(cls.__name__, cls.splits)

    def __new__(cls, *_: Any, **__: Any) -> Self:
        types = (str(a) for a in vars(cls).get("__annotations__", {}).values())
        if "__attrs_attrs__" not in vars(cls) and not all(a.startswith(("ClassVar", "typing.ClassVar")) for a in types):
            raise ShapeError(f"{cls.__name__} has fields but is not an attrs class: write @frozen (of attrs) above it")
        return object.__new__(cls)

    def body(self, x: Value, /, *_: Any, **side: Any) -> Value:
        """Return the output for the input x and the side inputs.

        A side input that the signature names without a default must be given: `body(self, x, /, memory, **side)`.
        """
        raise ShapeError(f"{type(self).__name__} has no body: write def body(self, x, /, **side)")

    def __call__(self, x: Value, /, **side: Value) -> Value:
        try:
            check_fields(self)
            for name in sorted(_required(type(self).body) - side.keys()):
                given = f" (given: {', '.join(side)})" if side else ""
                raise ShapeError(f"the side input {name!r} is missing{given}: write layer.given({name}=value)")
            out = self.body(x, **side)
            if not isinstance(out, Value):
                raise ShapeError(f"the body of {type(self).__name__} must return a value, not {safe_repr(out)}")
            if self.splits:
                self._check_split_dims(out, (x, *side.values()))
        except ShapeError as error:
            if not error.has_notes and error.at != caller():  # a line of the user's own body
                add_location(error, f"body of {type(self).__name__}", error.at)
            if self.named_in_errors:
                add_location(error, str(self), self.at)
            raise
        return Value(self, (x, *self.other_inputs(out, x, side)), out.shape, out, dtype=out.dtype, at=caller())

    def _check_split_dims(self, out: Value, given: tuple[Value, ...]) -> None:
        """Raise ShapeError if `splits` names a dim that neither the body nor its inputs have."""
        names, seen, todo = {d.name for v in given for d in v.shape}, {id(v) for v in given}, [out]
        while todo:
            v = todo.pop()
            if id(v) not in seen:
                seen.add(id(v))
                names |= set(v.shape.names)
                todo += [*v.args, *([] if v.body is None else [v.body])]
        for name in self.splits:
            if name not in names:
                known = f"{did_you_mean(name, names)}it has {', '.join(sorted(names))}"
                raise ShapeError(f"{type(self).__name__}.splits: the body has no dim {name!r}{known}")

    def other_inputs(self, out: Value, x: Value, side: Mapping[str, Value]) -> tuple[Value, ...]:
        """Return the values besides x and weights that the body reads: side inputs, and values in its fields."""
        if self.transparent:
            return tuple(side.values())
        outside = {id(v): v for v in (*side.values(), *held_values(self)) if not isinstance(v.op, Weight)}
        return tuple(v for i, v in outside.items() if i in _reached(out, x, outside)) if outside else ()

    def named(self, name: str) -> Layer:
        """Return this layer with a name: inside the body of another layer, its weights have the prefix `name.`."""
        return Named(name, self)

    def __rshift__(self, after: Layer) -> Layer:
        return chain(self, after)

    def given(self, **side: Value) -> Layer:
        """Return this layer with side inputs, which every layer inside it can read by name."""
        for name, value in side.items():
            if not isinstance(value, Value):
                raise ShapeError(f"the side input {name!r} must be a value, got {value!r}")
        return Given(self, side)

    def __str__(self) -> str:
        shown = (
            (f.name, getattr(self, f.name))
            for f in fields(type(self))
            if f.repr and (f.default is NOTHING or getattr(self, f.name) != f.default)
        )
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in shown)})"


@frozen
class Chain(Layer):
    """One layer after another: c(b(a(x)))."""

    layers: tuple[Layer, ...]
    transparent: ClassVar[bool] = True
    named_in_errors: ClassVar[bool] = False

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
    named_in_errors: ClassVar[bool] = False

    def body(self, x: Value, /, **side: Value) -> Value:
        return self.inner(x, **{**side, **self.side})


@frozen
class Named(Layer):
    """A layer with a name, which its weights carry as a prefix inside the body of another layer."""

    name: str
    inner: Layer
    transparent: ClassVar[bool] = True
    named_in_errors: ClassVar[bool] = False

    def body(self, x: Value, /, **side: Value) -> Value:
        return self.inner(x, **side)


def is_layer(_: object, __: object, it: Any) -> None:
    """Raise ShapeError if a field is neither a layer nor None. A validator for attrs fields."""
    if it is not None and not isinstance(it, Layer):
        raise not_a_layer(it)


def chain(*layers: Layer) -> Layer:
    """Return one layer that applies these in order. Chains inside are flattened, so that `>>` is associative."""
    for layer in layers:
        is_layer(None, None, layer)
    flat = tuple(part for layer in layers for part in (layer.layers if isinstance(layer, Chain) else (layer,)))
    if not flat:
        raise ShapeError("give at least one layer")
    return flat[0] if len(flat) == 1 else Chain(flat)


def held_values(it: object) -> Iterator[Value]:
    """Yield the values in the fields of a layer and of the layers inside it."""
    if isinstance(it, Value):
        yield it
    elif isinstance(it, Layer):
        for f in fields(type(it)):
            yield from held_values(getattr(it, f.name))
    elif isinstance(it, tuple):
        for part in it:
            yield from held_values(part)
    elif isinstance(it, dict):
        yield from held_values(tuple(it.values()))


@cache
def _required(body: Callable[..., Value]) -> frozenset[str]:
    """Return the side inputs that a body names without a default."""
    _, _, *side = signature(body).parameters.values()
    return frozenset(p.name for p in side if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))


def _reached(out: Value, x: Value, outside: Container[int]) -> set[int]:
    """Return the ids of the values in `outside` that a body's output depends on other than through x."""
    reached, seen, todo = set(), {id(x)}, [out]
    while todo:
        v = todo.pop()
        if id(v) in seen:
            continue
        seen.add(id(v))
        if id(v) in outside:
            reached.add(id(v))
        elif v.body is not None and isinstance(v.op, Layer) and v.op.transparent:
            todo.append(v.body)
        else:
            todo += v.args
    return reached


def op_name(op: Op) -> str:
    """Return the name of an op in snake case: rms_norm for RMSNorm, swiglu for SwiGLU, add for fn("add")."""
    own = getattr(op, "fn", None) or getattr(op, "name", None)
    if isinstance(own, str):
        return own
    name = type(op).__name__
    return re.sub(r"(?<=[A-Z])(?=[A-Z][a-z])|(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name).lower()
