"""Ops that change the shape of a tensor: select, slice, rename, concatenate, patches, masked scatter."""

from __future__ import annotations

from math import gcd
from typing import ClassVar

from attrs import evolve, frozen

from megaloom.dsl.base_ops import COPY, Rearrangement
from megaloom.dsl.dims import Dim, DType, Shape
from megaloom.dsl.errors import ShapeError, divisors
from megaloom.dsl.op import ALL_POSITIONS, ALONE, PLAIN, Decoding, Op, Reads
from megaloom.dsl.sharding_table import SEQUENCES
from megaloom.dsl.value import Value
from megaloom.dsl.work_kinds import Elements, Traffic, WorkKind


@frozen
class Select(Rearrangement):
    """One index of a dim: [.. dim] to [..]. Without an index, each copy of a layer in `Each` selects its own."""

    dim: str
    index: int | None = None
    work_kind: ClassVar[WorkKind] = WorkKind.NONE
    arity: ClassVar[int] = 1

    def shape(self, *args: Shape) -> Shape:
        (x,) = args
        size = x[self.dim].size
        if self.index is not None and (self.index < 0 or (size is not None and self.index >= size)):
            raise ShapeError(f"{x[self.dim]} has no index {self.index}: use 0 to {size - 1 if size else 'the last'}")
        return x.without(self.dim)

    def dtype(self, *args: DType) -> DType:
        return args[0]

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return (PLAIN if self.index is None else Reads(frozenset({self.dim})),)

    def decoding(self, out: Value, along: str) -> Decoding:
        return ALL_POSITIONS if along == self.dim else ALONE

    def mixes_documents(self, out: Value) -> bool:
        return self.dim in SEQUENCES and self.index != 0  # the first position reads the first document only


@frozen
class Rename(Rearrangement):
    """The argument with one dim renamed: [.. old] to [.. new]."""

    old: str
    new: str
    work_kind: ClassVar[WorkKind] = WorkKind.NONE
    arity: ClassVar[int] = 1

    def shape(self, *args: Shape) -> Shape:
        (x,) = args
        x[self.old]
        return Shape(tuple(evolve(d, name=self.new) if d.name == self.old else d for d in x))

    def dtype(self, *args: DType) -> DType:
        return args[0]

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return (Reads(renamed=(self.old, self.new)),)

    def decoding(self, out: Value, along: str) -> Decoding:
        return ALL_POSITIONS if along == self.old else ALONE


@frozen
class Slice(Rearrangement):
    """The indices start, …, stop - 1 of a dim: [.. dim] to a shorter [.. dim].

    Raises ShapeError for indices outside the dim, and for a dim whose size only the workload gives.
    """

    dim: str
    start: int
    stop: int
    work_kind: ClassVar[WorkKind] = WorkKind.NONE
    arity: ClassVar[int] = 1

    def shape(self, *args: Shape) -> Shape:
        (x,) = args
        size = _known_size(x[self.dim], "slice")
        if not 0 <= self.start < self.stop <= size:
            raise ShapeError(
                f"cannot slice {x[self.dim]} from {self.start} to {self.stop}: use 0 ≤ start < stop ≤ {size}"
            )
        return Shape(tuple(evolve(d, size=self.stop - self.start) if d.name == self.dim else d for d in x))

    def dtype(self, *args: DType) -> DType:
        return args[0]

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return (Reads(frozenset({self.dim})),)


@frozen
class Concat(Rearrangement):
    """The arguments concatenated along a dim: [.. over=m], [.. over=n] to [.. over=m+n].

    An argument is broadcast over the other dims that it lacks.
    """

    over: str

    def shape(self, *args: Shape) -> Shape:
        if not args:
            raise ShapeError(f"nothing to concatenate along {self.over}: give at least one value")
        size = sum(_known_size(s[self.over], "concatenate along") for s in args)
        big = max(args, key=lambda s: len(s.dims))
        rest = big.without(self.over)
        for s in args:
            for d in s.without(self.over):
                if d not in rest.dims:
                    raise ShapeError(f"cannot concatenate {s} and {big} along {self.over}: only one has {d}")
        return Shape(tuple(evolve(d, size=size) if d.name == self.over else d for d in big))

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return (Reads(frozenset({self.over})),) * len(out.args)

    def torch_traffic(self, out: Value, elements: Elements) -> Traffic:
        n = elements(out)
        return Traffic(sum(map(elements, out.args)) + n, COPY * n, 1, len(out.args))


@frozen
class Patches(Rearrangement):
    """Images [batch channels height width] as patches of `size` by `size` pixels: [batch patches pixels].

    Patches are in row-major order; the pixels of a patch are in the order channels, height, width.
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

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return (Reads(frozenset({"channels", "height", "width"})),)


@frozen
class MaskedScatter(Op):
    """x with its vectors at the positions of one token id replaced by the vectors of y, in order.

    Arguments: x [batch seq embed], y [batch patches embed], tokens [batch seq].
    """

    token: int
    work_kind: ClassVar[WorkKind] = WorkKind.MEMORY
    arity: ClassVar[int] = 3

    def shape(self, *args: Shape) -> Shape:
        x, y, tokens = args
        if x["embed"] != y["embed"]:
            raise ShapeError(f"cannot put {y} into {x}: {y['embed']} is not {x['embed']}")
        if tokens != x.without("embed"):
            raise ShapeError(f"cannot put {y} into {x} at tokens {tokens}: tokens must be {x.without('embed')}")
        return x

    def dtype(self, *args: DType) -> DType:
        if args[2] is not DType.INDEX:
            raise ShapeError("MaskedScatter's third argument must be token ids, an input such as ids()")
        return super().dtype(*args[:2])

    def reads(self, out: Value) -> tuple[Reads, ...]:
        """The index of a vector is the number of positions of the token before it."""
        return Reads(offset=SEQUENCES), Reads(SEQUENCES), Reads(SEQUENCES)

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return (out.args[2],)

    def mixes_documents(self, out: Value) -> bool:
        return False


def _known_size(d: Dim, action: str) -> int:
    if d.size is None:
        raise ShapeError(f"cannot {action} {d}: only the workload gives its size")
    return d.size
