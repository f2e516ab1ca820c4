"""Values and ops. A value is an op applied to earlier values. The elementwise ops are here: `x + y` makes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

from attrs import field, frozen

from .base_ops import COPY, UNARY_PASSES, Elementwise
from .dims import Dim, DType, Shape
from .errors import ShapeError, caller, did_you_mean
from .field_types import check_fields
from .op import Op
from .work_kinds import Elements, Traffic, WorkKind

LINEAR = frozenset({"add"})  # the backward pass reads nothing
COMPARISONS = frozenset({"equal", "less", "less_equal", "greater", "greater_equal"})  # 1 or 0, without a gradient
UNARY = frozenset(
    {"gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "relu2", "sigmoid", "tanh", "softplus", "exp", "log"}
    | {"reciprocal", "sqrt"}
)  # quick_gelu(x) = x * sigmoid(1.702 x), relu2(x) = relu(x)², reciprocal(x) = 1 / x
# The fusion group of a pointwise op: frameworks have kernels of their own for the gate of a gated unit (SwiGLU: its
# product, with the activation before it) and for adding a bias. What a framework makes of a group, its profile says.
Fusion = Literal["gate", "bias"]
NONLINEAR = UNARY | {"mul", "div", "min", "max", "where"}  # the backward pass reads the arguments
SAVE_RESULT = (
    "exp",
    "sigmoid",
    "tanh",
    "reciprocal",
    "sqrt",
)  # functions whose derivative torch computes from their result
# Passes over memory, forward and backward, of functions that torch has no single kernel for. The gradient of a
# reciprocal is a negation and two products.
COMPOSED_PASSES = {"quick_gelu": (7, 14), "relu2": (4, 8), "reciprocal": (2, 7)}
FUNCTIONS = LINEAR | NONLINEAR | COMPARISONS
NUMBERS_OF_ARGUMENTS = {
    **dict.fromkeys(UNARY, 1),
    **dict.fromkeys({"div", "min", "max"} | COMPARISONS, 2),
    "where": 3,
}  # of functions that do not take any number of them
NUMBER_WORDS = {1: "one argument", 2: "two arguments", 3: "three arguments", None: "one or more arguments"}


@frozen(eq=False, repr=False)
class Value:
    """An op applied to earlier values. Values are compared by identity: each is computed once."""

    op: Op
    args: tuple[Value, ...]
    shape: Shape
    body: Value | None = None  # for a layer: the output of its body
    dtype: DType = field(default=DType.COMPUTE, kw_only=True)
    at: str = field(default="", kw_only=True)  # file:line of the program

    def __getitem__(self, name: str) -> Dim:
        return self.shape[name]

    @property
    def source(self) -> Value:
        """The primitive that computes this value: the output of a layer is the output of its body."""
        value = self
        while value.body is not None:
            value = value.body
        return value

    def __rshift__(self, layer: Callable[[Value], Value]) -> Value:
        if not isinstance(layer, Op) or not callable(layer):
            raise not_a_layer(layer)
        return layer(self)

    def __add__(self, other: Value | float) -> Value:
        return apply(Affine(1.0, other), self) if isinstance(other, (int, float)) else fn("add", self, other)

    def __mul__(self, other: Value | float) -> Value:
        return apply(Affine(other), self) if isinstance(other, (int, float)) else fn("mul", self, other)

    def __lt__(self, other: Value) -> Value:
        return fn("less", self, other)

    def __le__(self, other: Value) -> Value:
        return fn("less_equal", self, other)

    def __gt__(self, other: Value) -> Value:
        return fn("greater", self, other)

    def __ge__(self, other: Value) -> Value:
        return fn("greater_equal", self, other)

    def __neg__(self) -> Value:
        return -1.0 * self

    def __sub__(self, other: Value | float) -> Value:
        return self + (-1.0 * other)

    def __rsub__(self, other: float) -> Value:
        return other + -self

    def __truediv__(self, other: Value | float) -> Value:
        if isinstance(other, Value):
            return fn("div", self, other)
        if not isinstance(other, (int, float)) or not other:
            raise ShapeError(f"a value can be divided by a value, or by a number other than 0, got {other!r}")
        return self * (1 / other)

    def __rtruediv__(self, number: float) -> Value:
        return number * fn("reciprocal", self)

    __radd__ = __add__
    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"<{self.op} {self.shape}>"


def apply(op: Op, *args: Value) -> Value:
    """Return the value of a primitive applied to these arguments. Raises ShapeError if they do not fit."""
    for a in args:
        if not isinstance(a, Value):
            raise ShapeError(f"{a!r} is not a value: values are inputs, weights, and layers applied to values")
    if op.arity not in (None, len(args)):
        raise ShapeError(f"{op} needs {op.arity} argument{'s' * (op.arity != 1)}, got {len(args)}")
    check_fields(op)
    shape, dtype = op.shape(*(a.shape for a in args)), op.dtype(*(a.dtype for a in args))
    return Value(op, args, shape, dtype=dtype, at=caller())


@frozen
class Pointwise(Elementwise):
    """An elementwise function: [..] to [..]. Arguments are broadcast over the dims that they lack.

    add and mul take one or more arguments, where(condition, x, y) three, div, min, max and comparisons (equal, less,
    less_equal, greater, greater_equal) two, the other functions one. A comparison is 1 or 0. fusion: the fusion group
    of its kernel. A chain of elementwise ops runs as one fused kernel, which reads and saves only the tensors that
    enter the chain.
    eager_tensors: tensors as large as the result that the chain saves besides, in a framework whose fused kernel
    supports SwiGLU only. Raises ShapeError for an unknown function, and if no argument has all the dims.
    """

    fn: str = field()
    fusion: Fusion | None = field(default=None, kw_only=True, eq=False, repr=False)  # not mathematics
    eager_tensors: int = field(default=0, kw_only=True, eq=False, repr=False)  # not mathematics
    work_kind: ClassVar[WorkKind] = WorkKind.POINTWISE

    @fn.validator
    def _known(self, _: object, name: str) -> None:
        if name not in FUNCTIONS:
            known = sorted(FUNCTIONS)
            raise ShapeError(f"unknown function {name!r}{did_you_mean(name, known)}known are {', '.join(known)}")

    def shape(self, *args: Shape) -> Shape:
        count = NUMBERS_OF_ARGUMENTS.get(self.fn)
        if not args or count not in (None, len(args)):
            needed = NUMBER_WORDS[count]
            raise ShapeError(f"{self.fn} needs {needed}, got {len(args)}")
        return super().shape(*args)

    def dtype(self, *args: DType) -> DType:
        if self.fn in COMPARISONS:
            if DType.INDEX in args and set(args) != {DType.INDEX}:
                raise ShapeError(f"{self.fn} compares ids with ids, or numbers with numbers")
            return DType.MASK
        if self.fn == "where" and args[0] is not DType.MASK:
            raise ShapeError("the first argument of where must be a mask: a comparison, such as x > y, or mask()")
        return super().dtype(*args)

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        if self.fn == "where":
            return out.args[:1]
        if self.fn == "relu":
            return (out,)  # its sign is enough, and the next op often saves it anyway
        return out.args if self.fn in NONLINEAR else ()

    def saved_by_torch(self, out: Value) -> tuple[Value, ...]:
        return (out,) if self.fn in SAVE_RESULT else self.saved_values(out)

    def torch_traffic(self, out: Value, elements: Elements) -> Traffic:
        n = elements(out)
        match self.fn:
            case "add" | "mul":
                return _combination(self.fn == "mul", n, [elements(a) for a in out.args])
            case "div":
                return _quotient(n, *map(elements, out.args))
            case "min" | "max" | "where":
                return _choice(n, [elements(a) for a in out.args])
            case name if name in COMPARISONS:
                return Traffic(sum(map(elements, out.args)) + n, 0, 1, 0)
        forward, backward = COMPOSED_PASSES.get(self.fn, UNARY_PASSES)
        return Traffic(forward * n, backward * n, forward // COPY, backward // COPY)

    def __str__(self) -> str:
        return self.fn


@frozen
class Affine(Elementwise):
    """scale * x + shift for numbers scale and shift: [..] to [..]. `2.0 * x` and `x + 1.0` are Affine."""

    scale: float = 1.0
    shift: float = 0.0
    arity: ClassVar[int] = 1

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return ()

    def torch_traffic(self, out: Value, elements: Elements) -> Traffic:
        """Return the traffic of a product and a sum; the gradient is scaled."""
        n = elements(out)
        return Traffic(2 * COPY * n, COPY * n, 2, 1)


@frozen
class Clamp(Elementwise):
    """Each element clamped to low ≤ x ≤ high; None is no bound: [..] to [..]."""

    low: float | None = None
    high: float | None = None
    arity: ClassVar[int] = 1

    def __attrs_post_init__(self) -> None:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ShapeError(f"Clamp needs low ≤ high, got low={self.low} and high={self.high}")

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return out.args


def _combination(product: bool, n: int, sizes: list[int]) -> Traffic:
    """Return the traffic of the sum or product with n elements of two or more tensors, of which some are broadcast."""
    kernels = len(sizes) - 1
    out = Traffic(2 * kernels * n + sum(sorted(sizes)[:kernels]), 0, kernels, 0)
    for size in sizes:
        if product:
            out += Traffic(0, 2 * n + sum(sizes) - size, 0, 1)
        if size < n:  # the gradient of a tensor that is broadcast is summed
            out += Traffic(0, n + size, 0, 1)
    return out


def _choice(n: int, sizes: list[int]) -> Traffic:
    """Return the traffic of the choice of n elements of two tensors; backward each gets the gradient or 0.

    sizes: of the tensors that the kernel reads, of which the last two have gradients.
    """
    backward, kernels = 2 * COPY * n, 2
    sums = [n + size for size in sizes[-2:] if size < n]  # the gradient of a tensor that is broadcast is summed
    return Traffic(sum(sizes) + n, backward + sum(sums), 1, kernels + len(sums))


def _quotient(n: int, x: int, y: int) -> Traffic:
    """Return the traffic of a quotient with n elements of tensors with x and y elements, of which one may be broadcast.

    The gradient of the dividend is a quotient; that of the divisor two, a negation and a product.
    """
    reads, kernels = (n + y) + (x + y + n + y) + n + 2 * n, 5
    sums = sum(n + size for size in (x, y) if size < n)  # the gradient of a tensor that is broadcast is summed
    return Traffic(x + y + n, reads + kernels * n + sums, 1, kernels + (x < n) + (y < n))


def not_a_layer(it: object) -> ShapeError:
    """Return the error for a value in a place where a layer must stand."""
    if isinstance(it, type) and issubclass(it, Op):
        return ShapeError(f"{it.__name__} is a class, not a layer: write {it.__name__}(...)")
    if isinstance(it, Op):
        return ShapeError(f"{it} is a primitive, not a layer: apply it with apply({it}, value)")
    if isinstance(it, Value):
        return ShapeError(f"{it!r} is a value, not a layer: write value >> layer")
    if isinstance(it, (list, tuple)):
        return ShapeError("a list is not a layer: give its layers as arguments, or write chain(*layers)")
    if type(it).__repr__ is object.__repr__:  # of a class of the user's own
        name = type(it).__name__
        return ShapeError(f"{name}() is not a layer: write class {name}(Layer) with a body")
    return ShapeError(f"{it!r} is not a layer")


def fn(name: str, *args: Value, fusion: Fusion | None = None, eager_tensors: int = 0) -> Value:
    """Return an elementwise function of values, by its name: gelu, silu, add, … (see `Pointwise`)."""
    return apply(Pointwise(name, fusion=fusion, eager_tensors=eager_tensors), *args)
