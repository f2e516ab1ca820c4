"""Values, the nodes of a program: applying an op to values makes a value."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from .dims import Dim, DType, Shape, Sizes
from .errors import ShapeError

if TYPE_CHECKING:
    from .layer import Layer

LINEAR = frozenset({"add"})  # their backward reads nothing
CURVED = frozenset({"mul", "gelu", "gelu_tanh", "silu", "relu"})  # their backward reads their inputs


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
        return layer(self)

    def __add__(self, other: Value) -> Value:
        return fn("add", self, other)

    def __mul__(self, other: Value) -> Value:
        return fn("mul", self, other)

    def __repr__(self) -> str:
        return f"<{self.op} {self.shape}>"


def apply(op: Op, *args: Value) -> Value:
    """The value of a primitive applied to these arguments."""
    try:
        return Value(op, args, op.shape(*(a.shape for a in args)), at=caller())
    except ShapeError as error:
        raise located(error, str(op), caller()) from None


@frozen
class Pointwise(Op):
    """One function of each element. Arguments are broadcast over the dims that they lack."""

    fn: str = field()

    @fn.validator
    def _known(self, _: object, name: str) -> None:
        if name not in LINEAR | CURVED:
            raise ShapeError(f"no function {name!r}: there are {', '.join(sorted(LINEAR | CURVED))}")

    def shape(self, *args: Shape) -> Shape:
        big = max(args, key=lambda s: len(s.dims))
        for s in args:
            for d in s:
                if d.name not in big or big[d.name] != d:
                    raise ShapeError(f"cannot {self.fn} {args[0]} and {args[-1]}: they differ in {d.name!r}")
        return big

    def keeps(self, out: Value) -> tuple[Value, ...]:
        return out.args if self.fn in CURVED else ()

    def __str__(self) -> str:
        return self.fn


def fn(name: str, *args: Value) -> Value:
    """A function of one element at a time; the arguments are broadcast over dims they lack."""
    return apply(Pointwise(name), *args)


def located(error: ShapeError, what: str, at: str) -> ShapeError:
    """The error, with a note of where it happened."""
    error.add_note(f"  in {what:<40} {short(at)}")
    return error


def caller() -> str:
    """The first line of the user's program on the stack, as file:line."""
    frame = sys._getframe(1)
    package = __package__ or ""
    while frame.f_back and (
        frame.f_globals.get("__name__", "").startswith(package) or frame.f_code.co_filename.startswith("<")
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def short(at: str) -> str:
    """A place as people write it: below the working directory relative, else the file's own name."""
    path = Path(at)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def renamed(d: Dim, name: str) -> Dim:
    """The same dim under another name."""
    return evolve(d, name=name)
