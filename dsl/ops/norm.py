"""Normalisation, and dropout."""

from __future__ import annotations

from math import prod
from typing import ClassVar

from attrs import frozen

from megaloom.dsl.dims import DType, Shape
from megaloom.dsl.errors import ShapeError, divisors
from megaloom.dsl.value import Op, Value


@frozen
class Normalize(Op):
    """x divided by its root mean square over the dims `over`, then scaled and shifted: [.. over] to [.. over].

    centred: subtract the mean first, as LayerNorm does. groups: split the dims `over`, taken together, into equal
    parts, each of which is normalised alone. Arguments: x, then optionally a scale [over] and a shift [over].
    """

    over: tuple[str, ...]
    centred: bool
    eps: float
    groups: int = 1

    def shape(self, *args: Shape) -> Shape:
        x, *weights = args
        if self.eps < 0:
            raise ShapeError(f"eps must be at least 0, got {self.eps}")
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

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return (out.args[0],)


@frozen
class Drop(Op):
    """Dropout: in training each element is zeroed with probability `rate`, else scaled by 1 / (1 - rate)."""

    rate: float
    elementwise: ClassVar[bool] = True
    arity: ClassVar[int] = 1

    def shape(self, *args: Shape) -> Shape:
        return args[0]

    def saved_buffers(self, out: Value) -> tuple[tuple[str, Shape, DType], ...]:
        return (("dropout mask", out.shape, DType.MASK),) if self.rate else ()
