"""Normalisation, and dropout."""

from __future__ import annotations

from math import prod
from typing import ClassVar

from attrs import frozen

from megaloom.dsl.base_ops import Elementwise
from megaloom.dsl.dims import DType, Shape
from megaloom.dsl.errors import ShapeError, divisors
from megaloom.dsl.op import PLAIN, Op, Reads
from megaloom.dsl.value import Value
from megaloom.dsl.work_kinds import Elements, Traffic, WorkKind

NORM_PASSES = (2, 5)  # over memory, forward and backward: one kernel, then one for the input and one for the weights
SCALE_PASSES = (2, 6)  # a product with a small tensor: the gradient of both, and the sum of the latter


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
    work_kind: ClassVar[WorkKind] = WorkKind.NORM

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

    def reads(self, out: Value) -> tuple[Reads, ...]:
        if self.groups > 1:
            return (Reads(frozenset(self.over), groups=(self.groups, self.over)),) * len(out.args)
        return Reads(statistics=self.over, exchanges=1), *(PLAIN for _ in out.args[1:])

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return (out.args[0],)

    def torch_traffic(self, out: Value, elements: Elements) -> Traffic:
        n = elements(out)
        norm = Traffic(NORM_PASSES[0] * n, NORM_PASSES[1] * n, 1, 2)
        return norm + Traffic(SCALE_PASSES[0] * n, SCALE_PASSES[1] * n, 1, 3) if self.groups > 1 else norm


@frozen
class Drop(Elementwise):
    """Dropout: in training each element is zeroed with probability `rate`, else scaled by 1 / (1 - rate)."""

    rate: float
    work_kind: ClassVar[WorkKind] = WorkKind.DROPOUT
    arity: ClassVar[int] = 1

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return ()

    def torch_traffic(self, out: Value, elements: Elements) -> Traffic | None:
        return None  # one kernel, priced by its kind

    def saved_buffers(self, out: Value) -> tuple[tuple[str, Shape, DType], ...]:
        return (("dropout mask", out.shape, DType.MASK),) if self.rate else ()
