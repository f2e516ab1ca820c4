"""Values, the nodes of a program: applying an op to values makes a value."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import field, frozen

from .dims import (
    Dim,
    DType,
    Shape,
    Sizes,
)
from .errors import ShapeError, caller, nearest

if TYPE_CHECKING:
    from .layer import Layer

LINEAR = frozenset({"add"})  # their backward reads nothing
UNARY = frozenset(
    {"gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "relu2", "sigmoid", "tanh", "softplus", "exp"}
)  # quick_gelu(x) = x * sigmoid(1.702 x), relu2(x) = relu(x)²
# The fusion group of a pointwise op: frameworks have kernels of their own for the gate of a gated unit (SwiGLU: its
# product, with the activation before it) and for adding a bias. What a framework makes of a group, its profile says.
Fusion = Literal["gate", "bias"]
CURVED = UNARY | {"mul"}  # their backward reads their inputs


class Op:
    """What a value is the result of: a primitive, or a layer made of them.

    A primitive of one's own is a frozen attrs class that says its `shape`; by default it costs no FLOPs, keeps nothing
    for its backward pass and refuses token ids. `runtime.evaluate` must be told what it computes.
    """

    elementwise: ClassVar[bool] = False  # whether each element of the result is made of the same one of each argument
    arity: ClassVar[int | None] = None  # how many arguments it takes; None: any that its shape accepts

    def shape(self, *args: Shape) -> Shape:
        """The shape of the result. Raises ShapeError when the arguments do not fit."""
        raise NotImplementedError

    def dtype(self, *args: DType) -> DType:
        """What an element of the result is. Raises ShapeError when those of the arguments are of the wrong kind."""
        if DType.INDEX in args:
            raise ShapeError(f"{self} computes with numbers, not with token ids: Embed(table) makes vectors of them")
        return DType.COMPUTE

    def flops(self, out: Shape, args: tuple[Shape, ...], size: Sizes) -> int:
        """FLOPs of the forward pass (a multiply and an add are two)."""
        return 0

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        """The values that the backward pass reads."""
        return ()

    def saved_buffers(self, out: Value) -> tuple[tuple[str, Shape, DType], ...]:
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

    def __add__(self, other: Value | float) -> Value:
        return apply(Affine(1.0, other), self) if isinstance(other, (int, float)) else fn("add", self, other)

    def __mul__(self, other: Value | float) -> Value:
        return apply(Affine(other), self) if isinstance(other, (int, float)) else fn("mul", self, other)

    def __neg__(self) -> Value:
        return -1.0 * self

    def __sub__(self, other: Value | float) -> Value:
        return self + (-1.0 * other)

    def __rsub__(self, other: float) -> Value:
        return other + -self

    def __truediv__(self, number: float) -> Value:
        if not isinstance(number, (int, float)) or not number:
            raise ShapeError(f"cannot divide by {number!r}: it takes a number other than 0")
        return self * (1 / number)

    __radd__ = __add__
    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"<{self.op} {self.shape}>"


def apply(op: Op, *args: Value) -> Value:
    """The value of a primitive applied to these arguments. Raises ShapeError when they do not fit, and says where."""
    for a in args:
        if not isinstance(a, Value):
            raise ShapeError(f"{a!r} is no value: a value is an input, a weight, or a layer applied to a value")
    if op.arity not in (None, len(args)):
        raise ShapeError(f"{op} takes {op.arity} value{'s' * (op.arity != 1)}, not {len(args)}")
    shape, dtype = op.shape(*(a.shape for a in args)), op.dtype(*(a.dtype for a in args))
    return Value(op, args, shape, dtype=dtype, at=caller())


@frozen
class Pointwise(Op):
    """One function of each element: [..] to [..]. Arguments are broadcast over the dims that they lack.

    add and mul take one value or more, the others one. Of a chain of them only what enters it is kept and moved, as one
    kernel computes it. Raises ShapeError for a name that is no function, and where no argument has all the dims.
    """

    fn: str = field()
    fusion: Fusion | None = field(default=None, kw_only=True, eq=False, repr=False)  # changes no number
    elementwise: ClassVar[bool] = True

    @fn.validator
    def _known(self, _: object, name: str) -> None:
        if name not in LINEAR | CURVED:
            known = sorted(LINEAR | CURVED)
            raise ShapeError(f"no function {name!r}{nearest(name, known)}there are {', '.join(known)}")

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

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        if self.fn == "relu":
            return (out,)  # which says as well where the argument was negative, and is often kept as it is
        return out.args if self.fn in CURVED else ()

    def __str__(self) -> str:
        return self.fn


@frozen
class Affine(Op):
    """scale * x + shift, the same numbers for each element: [..] to [..]. `2.0 * x` and `x + 1.0` make one."""

    scale: float = 1.0
    shift: float = 0.0
    elementwise: ClassVar[bool] = True
    arity: ClassVar[int] = 1

    def shape(self, *args: Shape) -> Shape:
        return args[0]


@frozen
class Clamp(Op):
    """Each element, but no less than `low` and no more than `high` (None: no bound): [..] to [..]."""

    low: float | None = None
    high: float | None = None
    elementwise: ClassVar[bool] = True
    arity: ClassVar[int] = 1

    def __attrs_post_init__(self) -> None:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ShapeError(f"nothing is at least {self.low} and at most {self.high}: give the lower bound first")

    def shape(self, *args: Shape) -> Shape:
        return args[0]

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return out.args


def no_layer(it: object) -> ShapeError:
    """The error of writing something else where a layer must stand."""
    if isinstance(it, type) and issubclass(it, Op):
        return ShapeError(f"{it.__name__} is a class, not a layer: call it to make one, {it.__name__}(...)")
    if isinstance(it, Op):
        return ShapeError(f"{it} is a primitive, not a layer: apply(...) applies one to values")
    if isinstance(it, Value):
        return ShapeError(f"{it!r} is a value, not a layer: values come first, value >> layer")
    if isinstance(it, (list, tuple)):
        return ShapeError("a list is no layer: write its layers as arguments, or chain(*layers)")
    if type(it).__repr__ is object.__repr__:  # of a class of the user's own
        name = type(it).__name__
        return ShapeError(f"{name}() is no layer: as class {name}(Layer), with its mathematics in a body, it is one")
    return ShapeError(f"{it!r} is no layer")


def fn(name: str, *args: Value, fusion: Fusion | None = None) -> Value:
    """A function of one element at a time, by its name: gelu, silu, add, … See `Pointwise`."""
    return apply(Pointwise(name, fusion=fusion), *args)
