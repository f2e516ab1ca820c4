"""The inputs of a model and its weights, and the ops that look up rows of a table."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from megaloom.dsl.base_ops import GivenTensor, TableLookup
from megaloom.dsl.dims import (
    BATCH,
    SEQ,
    Dim,
    DType,
    Shape,
)
from megaloom.dsl.errors import ShapeError, caller
from megaloom.dsl.field_types import check_fields
from megaloom.dsl.op import PLAIN, Reads
from megaloom.dsl.value import Value

INITIAL_STD = 0.02  # of weights, in models that set no other (GPT-2, and most models since)


@frozen
class Input(GivenTensor):
    """A tensor that the data provides, under a name that is unique in the model. It has no gradient."""

    name: str

    def __str__(self) -> str:
        return self.name


@frozen
class Weight(GivenTensor):
    """A parameter, initialised from a normal distribution with this mean and standard deviation.

    std: None is the standard deviation of the model that has the weight (see `model`). uniform: the distribution is
    uniform instead. With `trained=False` it is a buffer: it has no gradient and does not count as a parameter. frozen:
    it is a parameter that training leaves as it is, without gradient and optimizer state.
    """

    name: str
    mean: float = 0.0
    std: float | None = None
    trained: bool = True
    uniform: bool = False
    frozen: bool = False

    def __str__(self) -> str:
        return self.name


@frozen
class Lookup(TableLookup):
    """The rows of a table that token ids select: [..] and [key ..] to [.. ..]. Arguments: token ids, table.

    It has no FLOPs. Raises ShapeError if the first argument does not hold token ids.
    """

    arity: ClassVar[int] = 2
    ignores_padding: ClassVar[bool] = True

    def shape(self, *args: Shape) -> Shape:
        indices, table = args
        table[self.key]
        return Shape((*indices, *table.without(self.key)))

    def dtype(self, *args: DType) -> DType:
        if args[0] is not DType.INDEX:
            raise ShapeError("a table is looked up by token ids; the first argument must be an input such as ids()")
        return super().dtype(*args[1:])

    def reads(self, out: Value) -> tuple[Reads, ...]:
        """A shard of the table gives the rows that it has, and zeros."""
        return PLAIN, Reads(summed=(self.key,), rows=True)

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return (out.args[0],)


@frozen
class PositionLookup(TableLookup):
    """Row `offset + i` of a table for each position i: [batch seq ..] and [key ..] to [seq ..].

    Arguments: x, of which only the shape matters, and the table. x must have one dim besides batch, embed, and the
    dims of the table.
    """

    offset: int = 0
    arity: ClassVar[int] = 2

    def shape(self, *args: Shape) -> Shape:
        x, table = args
        if not 0 <= self.offset < table[self.key].known:
            raise ShapeError(f"offset {self.offset} is outside {table}: use 0 to {table[self.key].known - 1}")
        rows = table.without(self.key)
        return Shape((x.positions("embed", *(d.name for d in rows)), *rows))

    def dtype(self, *args: DType) -> DType:
        return super().dtype(*args[1:])

    def reads(self, out: Value) -> tuple[Reads, ...]:
        """Of x the shape alone."""
        return Reads(offset=frozenset({out.shape.dims[0].name}), rows=True), Reads(rows=True)

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return ()


def ids(name: str = "tokens", seq: Dim = SEQ) -> Value:
    """Return an input of token ids [batch seq]. An encoder has a sequence dim of its own: `seq=Dim("source")`."""
    return Value(Input(name), (), Shape((BATCH, seq)), dtype=DType.INDEX, at=caller())


def image(name: str = "image", *, channels: int = 3, height: int, width: int) -> Value:
    """Return an input of images [batch channels height width]."""
    dims = Dim("channels", channels), Dim("height", height), Dim("width", width)
    return Value(Input(name), (), Shape((BATCH, *dims)), at=caller())


def labels(name: str = "labels", seq: Dim | None = SEQ) -> Value:
    """Return an input of ids that a loss compares with logits: [batch seq], or [batch] with `seq=None`."""
    dims = (BATCH,) if seq is None else (BATCH, seq)
    return Value(Input(name), (), Shape(dims), dtype=DType.INDEX, at=caller())


def mask(name: str = "mask", seq: Dim = SEQ) -> Value:
    """Return an input of 0 and 1 for each position, [batch seq]: 1 where the loss counts."""
    return Value(Input(name), (), Shape((BATCH, seq)), dtype=DType.MASK, at=caller())


def token_weights(name: str = "weights", seq: Dim = SEQ) -> Value:
    """Return an input of numbers for each position, [batch seq]: the weight of its loss."""
    return Value(Input(name), (), Shape((BATCH, seq)), dtype=DType.FLOAT32, at=caller())


def weight(
    name: str, *dims: Dim, mean: float = 0.0, std: float | None = None, trained: bool = True, uniform: bool = False
) -> Value:
    """Return a parameter of these dims, initialised as normal(mean, std), or uniform; std 0 makes it constant.

    std: None is the model's, by default 0.02. A weight that is used twice is shared. A weight made inside a layer's
    body belongs to each application of that layer. With `trained=False` it is a buffer. Raises ShapeError for a dim
    without a size.
    """
    if not isinstance(name, str) or not name:
        raise ShapeError(f"a weight needs a name, got {name!r}: write weight('wte', Dim('vocab', 100), ...)")
    check_fields(op := Weight(name, mean, std, trained, uniform))
    if std is not None and std < 0:
        raise ShapeError(f"weight {name!r} cannot have the standard deviation {std}: use 0 or more")
    for d in dims:
        if isinstance(d, Dim) and d.size is None:
            raise ShapeError(f"dim {d.name} of weight {name!r} has no size: write Dim({d.name!r}, ...)")
    return Value(op, (), Shape(dims), at=caller())
