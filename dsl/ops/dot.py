"""Matrix products over named dims."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from megaloom.dsl.base_ops import Contraction
from megaloom.dsl.dims import Shape, Sizes
from megaloom.dsl.errors import ShapeError
from megaloom.dsl.value import Value, apply
from megaloom.dsl.work_kinds import Extents, WorkKind


@frozen
class Dot(Contraction):
    """The product of two values, summed over the dims `over`: [.. over], [over ..] to [.. ..].

    Other dims that both arguments have are batch dims. The forward pass takes 2 FLOPs for each pair of an element of
    the result and an index that is summed over. Raises ShapeError if an argument lacks a dim or the sizes differ.
    """

    work_kind: ClassVar[WorkKind] = WorkKind.PRODUCT
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

    def extents(self, out: Value) -> Extents:
        x, w = (a.shape for a in out.args)
        both = tuple(d for d in x if d.name in w and d.name not in self.over)
        names = (*self.over, *(d.name for d in both))
        return Extents(both, tuple(x.without(*names)), tuple(w.without(*names)), tuple(x[name] for name in self.over))

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        x, w = out.args
        return x, w

    def __str__(self) -> str:
        return f"dot over {', '.join(self.over)}"


def dot(x: Value, w: Value, *over: str) -> Value:
    """Return x times w, summed over the dims of these names (see `Dot`). Raises ShapeError if x or w lacks one."""
    return apply(Dot(over), x, w)
