"""Ops along the sequence: causal convolution, selective scan, shift."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from megaloom.dsl.base_ops import COPY, SUM, AlongSequence, GroupedScan
from megaloom.dsl.dims import DType, Shape, Sizes
from megaloom.dsl.errors import ShapeError, divisors
from megaloom.dsl.op import ALONE, Decoding, Op, Reads
from megaloom.dsl.value import Value
from megaloom.dsl.work_kinds import Elements, Traffic, WorkKind

FROM_STATE = Decoding(state=True)


@frozen
class Conv(AlongSequence):
    """A causal depthwise convolution along the sequence: [batch seq ..] to [batch seq ..].

    Position i reads positions i - width + 1 to i; the last entry of the kernel is the weight of position i itself.
    Arguments: x [batch seq ..], kernel [.. width].
    """

    along: str = "seq"
    work_kind: ClassVar[WorkKind] = WorkKind.CONVOLUTION
    arity: ClassVar[int] = 2
    channelwise: ClassVar[bool] = True

    def shape(self, *args: Shape) -> Shape:
        x, kernel = args
        x[self.along]
        channels = x.without("batch", self.along)
        if "width" not in kernel or kernel.without("width") != channels:
            raise ShapeError(
                f"cannot convolve {x} with {kernel}: the kernel must be {channels} with one more dim, `width`"
            )
        return x

    def flops(self, out: Shape, args: tuple[Shape, ...], size: Sizes) -> int:
        return 2 * size(out) * args[1]["width"].known

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return out.args

    def torch_traffic(self, out: Value, elements: Elements) -> Traffic:
        n, width = elements(out), out.args[1].shape["width"].known
        once = COPY * n + SUM * n * (width - 1)
        return Traffic(once, once + (SUM + 1) * n * width, width, 3 * width)

    def decoding(self, out: Value, along: str) -> Decoding:
        return FROM_STATE if along == self.along else ALONE


@frozen
class Scan(GroupedScan):
    """The selective scan of Mamba-2: [batch seq heads head_dim] to a tensor of equal shape.

    Each head has a state h [head_dim state] that starts at zero. At each position h becomes exp(dt a) h + dt x bᵀ and
    the output is h c. Head i reads group i * groups / heads of b and c. Source: Dao & Gu,
    arXiv:2405.21060.
    Arguments: x [batch seq heads head_dim], dt [batch seq heads], a [heads], b and c [batch seq groups state].
    """

    work_kind: ClassVar[WorkKind] = WorkKind.SCAN
    arity: ClassVar[int] = 5

    def shape(self, *args: Shape) -> Shape:
        x, dt, a, b, c = args
        x[self.along]
        n, g = x["heads"].known, b["groups"].known
        if n % g:
            raise ShapeError(f"{n} heads cannot share {g} groups of b and c evenly\ngroups can be {divisors(n)}")
        if dt != x.without("head_dim") or a.dims != (x["heads"],) or b != c:
            raise ShapeError(
                f"cannot scan {x} with dt {dt}, a {a}, b {b}, c {c}\n"
                f"dt must be {x.without('head_dim')}, a {Shape((x['heads'],))}, and b and c must have equal shapes"
            )
        b["state"]
        return x

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return (*out.args, out)

    def saved_by_torch(self, out: Value) -> tuple[Value, ...]:
        return out.args  # it runs again in the backward pass


@frozen
class Shift(AlongSequence):
    """The argument shifted by `by`: position i holds what was at i + by, or zero (token 0) past the end."""

    by: int
    work_kind: ClassVar[WorkKind] = WorkKind.MEMORY
    arity: ClassVar[int] = 1

    def shape(self, *args: Shape) -> Shape:
        (x,) = args
        x[self.along]
        return x

    def dtype(self, *args: DType) -> DType:
        return args[0]

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return ()

    def decoding(self, out: Value, along: str) -> Decoding:
        if along != self.along:
            return ALONE
        return Decoding(refusal="reads later tokens") if self.by > 0 else FROM_STATE


@frozen
class Inside(Op):
    """1 at each position i for which i + by lies inside the sequence, else 0: [batch seq] to an equal shape.

    Of the argument only the shape matters.
    """

    along: str
    by: int
    work_kind: ClassVar[WorkKind] = WorkKind.MEMORY
    arity: ClassVar[int] = 1

    def shape(self, *args: Shape) -> Shape:
        args[0][self.along]
        return args[0]

    def dtype(self, *args: DType) -> DType:
        return DType.MASK

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return (Reads(offset=frozenset({self.along})),)

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return ()
