"""The primitives of tables, products and norms. Each knows its shape, its FLOPs and what its backward pass keeps."""

from __future__ import annotations

from math import prod
from typing import ClassVar

from attrs import frozen

from megaloom.dsl.dims import (
    BATCH,
    SEQ,
    Dim,
    DType,
    Shape,
    Sizes,
)
from megaloom.dsl.errors import ShapeError, caller, divisors
from megaloom.dsl.value import Op, Value, apply


@frozen
class Input(Op):
    """What the data provides, by a name of its own in the model. It has no gradient."""

    name: str

    def __str__(self) -> str:
        return self.name


@frozen
class Weight(Op):
    """A parameter, drawn at the start from a normal distribution of this mean and standard deviation.

    One that is not trained is a buffer: no gradient changes it, and it counts as no parameter.
    """

    name: str
    mean: float = 0.0
    std: float = 0.02
    trained: bool = True

    def __str__(self) -> str:
        return self.name


@frozen
class Dot(Op):
    """The sum over some dims, which both have, of the products of two values; other dims that both have stay.

    [.. over], [over ..] to [.. ..], at 2 FLOPs for each element of the result and of what is summed. Raises ShapeError
    where a dim is missing, or of another size.
    """

    over: tuple[str, ...]
    arity: ClassVar[int] = 2

    def shape(self, *args: Shape) -> Shape:
        x, w = args
        for name in self.over:
            if x[name] != w[name]:
                raise ShapeError(f"cannot contract {x} with {w}: {x[name]} is not {w[name]}")
        left, right = x.without(*self.over), w.without(*self.over)
        for d in right:
            if d.name in left and left[d.name] != d:
                raise ShapeError(f"cannot contract {x} with {w}: {left[d.name]} is not {d}")
        return Shape((*left, *(d for d in right if d.name not in left)))

    def flops(self, out: Shape, args: tuple[Shape, ...], size: Sizes) -> int:
        return 2 * size(out) * size(args[0][name] for name in self.over)

    def keeps(self, out: Value) -> tuple[Value, ...]:
        x, w = out.args
        return x, w

    def __str__(self) -> str:
        return f"dot over {', '.join(self.over)}"


@frozen
class Drop(Op):
    """Each element is zeroed with this probability, else scaled by 1 / (1 - rate), while training."""

    rate: float
    elementwise: ClassVar[bool] = True
    arity: ClassVar[int] = 1

    def shape(self, *args: Shape) -> Shape:
        return args[0]

    def notes(self, out: Value) -> tuple[tuple[str, Shape, DType], ...]:
        return (("dropout mask", out.shape, DType.MASK),) if self.rate else ()


@frozen
class Normalize(Op):
    """Divide by the root mean square over some dims (centred first or not), then scale (and shift) by weights.

    [.. over] to the same. In several groups, each equal part of the dims, taken together, is normalized by itself.
    Arguments: x, then a scale [over] and a shift [over] if there are.
    """

    over: tuple[str, ...]
    centred: bool
    eps: float
    groups: int = 1

    def shape(self, *args: Shape) -> Shape:
        x, *weights = args
        dims = tuple(x[name] for name in self.over)
        if self.groups < 1 or (self.groups > 1 and prod(d.known for d in dims) % self.groups):
            raise ShapeError(
                f"cannot normalize {Shape(dims)} in {self.groups} groups: they must divide it evenly\n"
                f"groups can be {divisors(prod(d.known for d in dims))}"
            )
        for w in weights:
            if w.dims != dims:
                raise ShapeError(f"cannot normalize {x} over {', '.join(self.over)} with a weight of {w}")
        return x

    def keeps(self, out: Value) -> tuple[Value, ...]:
        return (out.args[0],)


@frozen
class Lookup(Op):
    """The rows of a table that indices name: [..] and [key ..] to [.. ..]. Arguments: token ids, table.

    No FLOPs. Raises ShapeError for what is no index.
    """

    key: str
    arity: ClassVar[int] = 2

    def shape(self, *args: Shape) -> Shape:
        indices, table = args
        table[self.key]
        return Shape((*indices, *table.without(self.key)))

    def dtype(self, *args: DType) -> DType:
        if args[0] is not DType.INDEX:
            raise ShapeError("a row is looked up by a token id, an input such as ids(), not by a number")
        return super().dtype(*args[1:])

    def keeps(self, out: Value) -> tuple[Value, ...]:
        return (out.args[0],)


@frozen
class Rows(Op):
    """The rows of a table from `offset` on, one for each position of x: [batch seq ..] and [key ..] to [seq ..].

    Arguments: x (of which nothing but its positions is read), table.
    """

    key: str
    offset: int = 0
    arity: ClassVar[int] = 2

    def shape(self, *args: Shape) -> Shape:
        x, table = args
        if not 0 <= self.offset < table[self.key].known:
            raise ShapeError(
                f"no rows of {table} from {self.offset} on: offset can be 0 to {table[self.key].known - 1}"
            )
        return Shape((x.positions("embed"), *table.without(self.key)))

    def dtype(self, *args: DType) -> DType:
        return super().dtype(*args[1:])


def ids(name: str = "tokens", seq: Dim = SEQ) -> Value:
    """An input of token ids, [batch seq]; along another sequence of its own for an encoder, Dim("source")."""
    return Value(Input(name), (), Shape((BATCH, seq)), dtype=DType.INDEX, at=caller())


def image(name: str = "image", *, channels: int = 3, height: int, width: int) -> Value:
    """An input of images, [batch channels height width]."""
    dims = Dim("channels", channels), Dim("height", height), Dim("width", width)
    return Value(Input(name), (), Shape((BATCH, *dims)), at=caller())


def weight(name: str, *dims: Dim, mean: float = 0.0, std: float = 0.02, trained: bool = True) -> Value:
    """A parameter. Used twice, it is shared; made inside a layer, it is that layer's own.

    Its initial values are normal(mean, std); a std of 0 makes it constant. Untrained, it is a buffer. Raises ShapeError
    for a dim without a size.
    """
    if not isinstance(name, str) or not name:
        raise ShapeError(f"a weight has a name, and {name!r} is none: write weight('wte', Dim('vocab', 100), ...)")
    if std < 0:
        raise ShapeError(f"weight {name!r} cannot have a standard deviation of {std}: it takes 0 or more")
    for d in dims:
        if isinstance(d, Dim) and d.size is None:
            raise ShapeError(f"weight {name!r} has sizes of its own, but {d.name} has none: write Dim({d.name!r}, ...)")
    return Value(Weight(name, mean, std, trained), (), Shape(dims), at=caller())


def dot(x: Value, w: Value, *over: str) -> Value:
    """x and w contracted over the dims of these names: see `Dot`. Raises ShapeError when one of them lacks a dim."""
    return apply(Dot(over), x, w)
