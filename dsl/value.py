"""Values, the nodes of a program: applying an op to values makes a value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from .dims import Dim, DType, Shape, Sizes
from .errors import ShapeError, caller

if TYPE_CHECKING:
    from .layer import Layer

LINEAR = frozenset({"add"})  # their backward reads nothing
UNARY = frozenset({"gelu", "gelu_tanh", "silu", "relu"})
CURVED = UNARY | {"mul"}  # their backward reads their inputs


class Op:
    """What a value is the result of: a primitive, or a layer made of them."""

    def shape(self, *args: Shape) -> Shape:
        """The shape of the result. Raises ShapeError when the arguments do not fit."""
        raise NotImplementedError

    def flops(self, out: Shape, args: tuple[Shape, ...], size: Sizes) -> int:
        """FLOPs of the forward pass (a multiply and an add are two)."""
        return 0

    def keeps(self, out: Value) -> tuple[Value, ...]:
        """The values that the backward pass reads."""
        return ()

    def notes(self, out: Value) -> tuple[tuple[str, Shape, DType], ...]:
        """What else the backward pass reads, that is no value of the program: masks, statistics."""
        return ()


@frozen(eq=False, repr=False)
class Value:
    """An op applied to earlier values. Identity is meaning: one value, computed once."""

    op: Op
    args: tuple[Value, ...]
    shape: Shape
    body: Value | None = None  # what a layer's application stands for
    dtype: DType = field(default=DType.COMPUTE, kw_only=True)
    at: str = field(default="", kw_only=True)  # file:line that made it

    def __getitem__(self, name: str) -> Dim:
        return self.shape[name]

    @property
    def source(self) -> Value:
        """The primitive that computes this value: a layer's output is its body's."""
        value = self
        while value.body is not None:
            value = value.body
        return value

    def __rshift__(self, layer: Layer) -> Value:
        if not isinstance(layer, Op) or not callable(layer):
            raise no_layer(layer)
        return layer(self)

    def __add__(self, other: Value) -> Value:
        return fn("add", self, other)

    def __mul__(self, other: Value) -> Value:
        return fn("mul", self, other)

    def __repr__(self) -> str:
        return f"<{self.op} {self.shape}>"


def apply(op: Op, *args: Value) -> Value:
    """The value of a primitive applied to these arguments."""
    for a in args:
        if not isinstance(a, Value):
            raise ShapeError(f"{a!r} is no value: a value is an input, a weight, or a layer applied to a value")
    return Value(op, args, op.shape(*(a.shape for a in args)), at=caller())


@frozen
class Pointwise(Op):
    """One function of each element. Arguments are broadcast over the dims that they lack."""

    fn: str = field()

    @fn.validator
    def _known(self, _: object, name: str) -> None:
        if name not in LINEAR | CURVED:
            raise ShapeError(f"no function {name!r}: there are {', '.join(sorted(LINEAR | CURVED))}")

    def shape(self, *args: Shape) -> Shape:
        if not args or (self.fn in UNARY and len(args) > 1):
            takes = "one value" if self.fn in UNARY else "one or more values"
            raise ShapeError(f"{self.fn} takes {takes}, not {len(args)}")
        big = max(args, key=lambda s: len(s.dims))
        for s in args:
            for d in s:
                if d.name not in big:
                    raise ShapeError(f"cannot {self.fn} {s} and {big}: neither has all the dims of the other")
                if big[d.name] != d:
                    raise ShapeError(f"cannot {self.fn} {s} and {big}: {d} is not {big[d.name]}")
        return big

    def keeps(self, out: Value) -> tuple[Value, ...]:
        return out.args if self.fn in CURVED else ()

    def __str__(self) -> str:
        return self.fn


def no_layer(it: object) -> ShapeError:
    """The error of writing something else where a layer must stand."""
    if isinstance(it, type) and issubclass(it, Op):
        return ShapeError(f"{it.__name__} is a class, not a layer: call it to make one, {it.__name__}(...)")
    if isinstance(it, Op):
        return ShapeError(f"{it} is a primitive, not a layer: apply(...) applies one to values")
    if isinstance(it, (list, tuple)):
        return ShapeError("a list is no layer: write its layers as arguments, or chain(*layers)")
    return ShapeError(f"{it!r} is no layer")


def fn(name: str, *args: Value) -> Value:
    """A function of one element at a time; the arguments are broadcast over dims they lack."""
    return apply(Pointwise(name), *args)


def renamed(d: Dim, name: str) -> Dim:
    """The same dim under another name."""
    return evolve(d, name=name)
