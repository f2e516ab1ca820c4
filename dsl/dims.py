"""Named dimensions, the shapes made of them, and their sizes under a workload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from fractions import Fraction
from math import prod

from attrs import field, frozen

from .errors import ShapeError, nearest


class DType(StrEnum):
    """What an element is. The workload's precision says how many bytes a `COMPUTE` element takes."""

    COMPUTE = "compute"
    FLOAT32 = "float32"
    INDEX = "index"
    MASK = "mask"


NBYTES: Mapping[DType, int] = {DType.FLOAT32: 4, DType.INDEX: 8, DType.MASK: 1}  # the workload says what COMPUTE takes


@frozen
class Dim:
    """A dimension of a tensor, known by its name.

    A dim without a size (batch, seq) is bound by the workload. A derived dim (the slots of
    an expert) is a share of the product of other dims.
    """

    name: str = field()
    size: int | None = field(default=None)
    share: Fraction = Fraction(1)
    of: tuple[Dim, ...] = ()

    @name.validator
    def _named(self, _: object, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise ShapeError(f"a dim has a name, and {name!r} is none: write Dim('embed', 512)")

    @size.validator
    def _positive(self, _: object, size: int | None) -> None:
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ShapeError(f"{self.name} cannot have size {size!r}: a size is a whole number of at least 1")

    @property
    def known(self) -> int:
        """The size. Raises ShapeError for a dim that the workload binds."""
        if self.size is None:
            raise ShapeError(f"{self.name} has no size here: give it one, Dim({self.name!r}, ...)")
        return self.size

    def __str__(self) -> str:
        return self.name if self.size is None else f"{self.name}={self.size}"


BATCH, SEQ = Dim("batch"), Dim("seq")


@frozen
class Shape:
    """An ordered set of dims; no two of them share a name.

    >>> str(Shape((BATCH, SEQ, Dim("embed", 4096))))
    '[batch seq embed=4096]'
    """

    dims: tuple[Dim, ...]

    def __attrs_post_init__(self) -> None:
        for d in self.dims:
            if not isinstance(d, Dim):
                raise ShapeError(f"{d!r} is no dim: a shape is made of dims, such as Dim('embed', 512)")
        names = [d.name for d in self.dims]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ShapeError(f"{self} has {twice!r} twice: rename one of them")

    def __iter__(self) -> Iterator[Dim]:
        return iter(self.dims)

    def __contains__(self, name: str) -> bool:
        return any(d.name == name for d in self.dims)

    def __getitem__(self, name: str) -> Dim:
        for d in self.dims:
            if d.name == name:
                return d
        names = [d.name for d in self.dims]
        raise ShapeError(f"{self} has no dim {name!r}{nearest(name, names)}it has {', '.join(names) or 'none'}")

    def positions(self, *channels: str) -> Dim:
        """The dim that tells positions apart: the only one besides batch and the dims of these names."""
        found = [d for d in self.dims if d.name not in ("batch", *channels)]
        if len(found) != 1 or found[0].of:
            raise ShapeError(
                f"{self} must have one dim of positions, such as seq, besides {', '.join(('batch', *channels))}"
            )
        return found[0]

    def without(self, *names: str) -> Shape:
        """This shape less the dims of these names."""
        return Shape(tuple(d for d in self.dims if d.name not in names))

    def __str__(self) -> str:
        return "[" + " ".join(map(str, self.dims)) + "]"


class Sizes(dict[str, int]):
    """The workload: sizes for the dims that a model leaves open.

    >>> Sizes(batch=2, seq=8)((BATCH, SEQ, Dim("embed", 4)))
    64
    """

    def __call__(self, dims: Iterable[Dim]) -> int:
        """The number of elements of a tensor of these dims."""
        return prod(map(self.of, dims))

    def of(self, d: Dim) -> int:
        """The size of one dim."""
        if d.size is not None:
            return d.size
        if d.of:
            return int(self(d.of) * d.share)
        if d.name not in self:
            raise ShapeError(f"{d.name} has no size: the workload gives {', '.join(self) or 'none'}")
        return self[d.name]
