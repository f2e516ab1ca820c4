"""The same numbers seen otherwise: renamed, cut, joined, taken apart into patches, put in their places."""

from __future__ import annotations

from math import gcd
from typing import ClassVar

from attrs import evolve, frozen

from megaloom.dsl.dims import Dim, DType, Shape
from megaloom.dsl.errors import ShapeError, divisors
from megaloom.dsl.value import Op, Value, renamed


@frozen
class Pick(Op):
    """One index of a dim: [.. dim] to [..]. Without an index, what each copy of a repeated layer sees: its own."""

    dim: str
    index: int | None = None
    arity: ClassVar[int] = 1

    def shape(self, *args: Shape) -> Shape:
        (x,) = args
        size = x[self.dim].size
        if self.index is not None and (self.index < 0 or (size is not None and self.index >= size)):
            raise ShapeError(f"{x[self.dim]} has no index {self.index}: it has 0 to {size - 1 if size else 'the last'}")
        return x.without(self.dim)

    def dtype(self, *args: DType) -> DType:
        return args[0]


@frozen
class Rename(Op):
    """The same value with one dim under another name: [.. old] to [.. new]."""

    old: str
    new: str
    arity: ClassVar[int] = 1

    def shape(self, *args: Shape) -> Shape:
        (x,) = args
        x[self.old]
        return Shape(tuple(renamed(d, self.new) if d.name == self.old else d for d in x))

    def dtype(self, *args: DType) -> DType:
        return args[0]


@frozen
class Slice(Op):
    """The indices of a dim from `start` up to (not including) `stop`: [.. dim] to [.. dim], shorter.

    Raises ShapeError for indices that the dim lacks, and for a dim that only the workload knows the size of.
    """

    dim: str
    start: int
    stop: int
    arity: ClassVar[int] = 1

    def shape(self, *args: Shape) -> Shape:
        (x,) = args
        size = _counted(x[self.dim], "take a part of")
        if not 0 <= self.start < self.stop <= size:
            raise ShapeError(f"cannot take {self.start} to {self.stop} of {x[self.dim]}: it has 0 to {size}")
        return Shape(tuple(evolve(d, size=self.stop - self.start) if d.name == self.dim else d for d in x))

    def dtype(self, *args: DType) -> DType:
        return args[0]


@frozen
class Concat(Op):
    """Values one after the other along a dim: [.. over=m], [.. over=n] to [.. over=m+n].

    Each is broadcast over the other dims that it lacks.
    """

    over: str

    def shape(self, *args: Shape) -> Shape:
        if not args:
            raise ShapeError(f"nothing to join along {self.over}: give it one value or more")
        size = sum(_counted(s[self.over], "join values along") for s in args)
        big = max(args, key=lambda s: len(s.dims))
        rest = big.without(self.over)
        for s in args:
            for d in s.without(self.over):
                if d not in rest.dims:
                    raise ShapeError(f"cannot join {s} and {big} along {self.over}: only one has {d}")
        return Shape(tuple(evolve(d, size=size) if d.name == self.over else d for d in big))


@frozen
class Patches(Op):
    """Images [batch channels height width] as squares of `size` by `size` pixels, row by row: [batch patches pixels].

    The pixels of a patch are in the order channels, height, width.
    """

    size: int
    arity: ClassVar[int] = 1

    def shape(self, *args: Shape) -> Shape:
        (x,) = args
        h, w = x["height"].known, x["width"].known
        if self.size < 1 or h % self.size or w % self.size:
            raise ShapeError(
                f"{x} does not divide into patches of {self.size} by {self.size}\nsize can be {divisors(gcd(h, w))}"
            )
        pixels = x["channels"].known * self.size**2
        return Shape((x["batch"], Dim("patches", h // self.size * (w // self.size)), Dim("pixels", pixels)))


@frozen
class Place(Op):
    """x with its vectors where the tokens are `token` replaced by those of y, in order.

    Arguments: x [batch seq embed], y [batch patches embed], tokens [batch seq].
    """

    token: int
    arity: ClassVar[int] = 3

    def shape(self, *args: Shape) -> Shape:
        x, y, tokens = args
        if x["embed"] != y["embed"]:
            raise ShapeError(f"cannot put {y} into {x}: {y['embed']} is not {x['embed']}")
        if tokens != x.without("embed"):
            raise ShapeError(f"cannot put {y} into {x} where tokens {tokens} say: they must be {x.without('embed')}")
        return x

    def dtype(self, *args: DType) -> DType:
        if args[2] is not DType.INDEX:
            raise ShapeError("where tokens are is read off token ids, an input such as ids(), not off vectors")
        return super().dtype(*args[:2])

    def keeps(self, out: Value) -> tuple[Value, ...]:
        return (out.args[2],)


def _counted(d: Dim, what: str) -> int:
    if d.size is None:
        raise ShapeError(f"cannot {what} {d}: only the workload knows how long it is")
    return d.size
