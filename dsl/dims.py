"""Named dims, shapes made of them, and sizes under a workload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from math import prod

from attrs import field, frozen

from .errors import ShapeError, did_you_mean


class DType(StrEnum):
    """The type of a tensor's elements. The workload's precision gives the bytes of a `COMPUTE` element."""

    COMPUTE = "compute"
    FLOAT32 = "float32"
    INDEX = "index"
    MASK = "mask"


MAX_LAYERS = 2_000
"""Most layers of a model, each of which is built. The deepest published Transformer has 1,000."""
LARGEST_DIM = 2**31 - 1
"""Largest size of a dim. Products of sizes, in elements and bytes, are then far from the limits of 64-bit integers."""
NBYTES: Mapping[DType, int] = {DType.FLOAT32: 4, DType.INDEX: 8, DType.MASK: 1}  # COMPUTE: see the workload


@frozen
class Dim:
    """A named dimension of a tensor.

    The workload gives the size of a dim that has none (batch, seq). The size of a derived dim, such as the slots of an
    expert, is `share` times the product of the dims `of`.
    """

    name: str = field()
    size: int | None = field(default=None)
    share: Fraction = Fraction(1)
    of: tuple[Dim, ...] = ()

    @name.validator
    def _named(self, _: object, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise ShapeError(f"a dim needs a name, got {name!r}: write Dim('embed', 512)")

    @size.validator
    def _positive(self, _: object, size: int | None) -> None:
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ShapeError(f"the size of dim {self.name} must be a whole number of at least 1, got {size!r}")
        if size is not None and size > LARGEST_DIM:
            raise ShapeError(f"the size of dim {self.name} must be at most {LARGEST_DIM:,}, got {size:,}")

    @property
    def known(self) -> int:
        """The size. Raises ShapeError if only the workload gives it."""
        if self.size is None:
            raise ShapeError(f"dim {self.name} has no size here: write Dim({self.name!r}, ...)")
        return self.size

    def __str__(self) -> str:
        return self.name if self.size is None else f"{self.name}={self.size}"


BATCH, SEQ = Dim("batch"), Dim("seq")


@frozen
class Shape:
    """An ordered set of dims with distinct names.

    >>> str(Shape((BATCH, SEQ, Dim("embed", 4096))))
    '[batch seq embed=4096]'
    """

    dims: tuple[Dim, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of the dims."""
        return tuple(d.name for d in self.dims)

    def __attrs_post_init__(self) -> None:
        for d in self.dims:
            if not isinstance(d, Dim):
                raise ShapeError(f"a shape is made of dims, such as Dim('embed', 512), got {d!r}")
        names = [d.name for d in self.dims]
        if len(set(names)) < len(names):
            double = next(name for name in names if names.count(name) > 1)
            raise ShapeError(f"{self} has two dims named {double!r}: rename one of them")

    def __iter__(self) -> Iterator[Dim]:
        return iter(self.dims)

    def __contains__(self, name: str) -> bool:
        return any(d.name == name for d in self.dims)

    def __getitem__(self, name: str) -> Dim:
        for d in self.dims:
            if d.name == name:
                return d
        names = [d.name for d in self.dims]
        raise ShapeError(f"{self} has no dim {name!r}{did_you_mean(name, names)}it has {', '.join(names) or 'none'}")

    def positions(self, *channels: str) -> Dim:
        """Return the sequence dim: the one dim besides batch and `channels`. Raises ShapeError if it is not one."""
        others = [d for d in self.dims if d.name not in ("batch", *channels)]
        if len(others) != 1 or others[0].of:
            has = ", ".join(d.name for d in others) or "none"
            unordered = ", and slots of experts have no order" if any(d.of for d in others) else ""
            raise ShapeError(f"{self} must have exactly one sequence dim, such as seq: it has {has}{unordered}")
        return others[0]

    def without(self, *names: str) -> Shape:
        """Return this shape without the dims of these names."""
        return Shape(tuple(d for d in self.dims if d.name not in names))

    def __str__(self) -> str:
        return "[" + " ".join(map(str, self.dims)) + "]"


class Sizes(dict[str, int]):
    """The sizes that a workload gives to the dims that have none.

    >>> Sizes(batch=2, seq=8)((BATCH, SEQ, Dim("embed", 4)))
    64
    """

    def __call__(self, dims: Iterable[Dim]) -> int:
        """Return the number of elements of a tensor with these dims."""
        return prod(map(self.of, dims))

    def of(self, d: Dim) -> int:
        """Return the size of one dim. Raises ShapeError if the workload does not give it."""
        if d.size is not None:
            return d.size
        if d.of:
            return int(self(d.of) * d.share)
        if d.name not in self:
            raise ShapeError(f"dim {d.name} has no size: the workload gives {', '.join(self) or 'none'}")
        return self[d.name]
