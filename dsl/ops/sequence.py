"""What runs along a sequence in its order: causal convolution, and the scan of a state space."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from megaloom.dsl.dims import DType, Shape, Sizes
from megaloom.dsl.errors import ShapeError, divisors
from megaloom.dsl.value import Op, Value


@frozen
class Conv(Op):
    """Each channel convolved with its own kernel along the sequence, over this position and those before it.

    Arguments: x [batch seq ..], kernel [.. width], the last of which is the weight of the position itself.
    """

    along: str = "seq"
    arity: ClassVar[int] = 2

    def shape(self, *args: Shape) -> Shape:
        x, kernel = args
        x[self.along]
        channels = x.without("batch", self.along)
        if "width" not in kernel or kernel.without("width") != channels:
            raise ShapeError(f"cannot convolve {x} with {kernel}: its dims must be those of {channels}, and a width")
        return x

    def flops(self, out: Shape, args: tuple[Shape, ...], size: Sizes) -> int:
        return 2 * size(out) * args[1]["width"].known

    def keeps(self, out: Value) -> tuple[Value, ...]:
        return out.args


@frozen
class Scan(Op):
    """The outputs of a selective state space (Mamba-2; Dao & Gu, arXiv:2405.21060).

    [batch seq heads head_dim] to the same. A state h [head_dim state] for each head starts at zero and becomes
    exp(dt a) h + dt x bᵀ at each position, whose output is h c. Head i reads group i * groups / heads of b and c.
    Arguments: x [batch seq heads head_dim], dt [batch seq heads], a [heads], b and c [batch seq groups state].
    """

    along: str = "seq"
    arity: ClassVar[int] = 5

    def shape(self, *args: Shape) -> Shape:
        x, dt, a, b, c = args
        x[self.along]
        n, g = x["heads"].known, b["groups"].known
        if n % g:
            raise ShapeError(f"{n} heads cannot share {g} groups of a state evenly\ngroups can be {divisors(n)}")
        if dt != x.without("head_dim") or a.dims != (x["heads"],) or b != c:
            raise ShapeError(
                f"cannot scan {x} with dt {dt}, a {a}, b {b}, c {c}\n"
                f"dt must be {x.without('head_dim')}, a {Shape((x['heads'],))}, and b and c alike"
            )
        b["state"]
        return x

    def flops(self, out: Shape, args: tuple[Shape, ...], size: Sizes) -> int:
        """7 for each number of the state and position: Megatron-LM's count (num_floating_point_operations)."""
        return 7 * size(out) * args[3]["state"].known

    def keeps(self, out: Value) -> tuple[Value, ...]:
        return (*out.args, out)


@frozen
class Shift(Op):
    """Position i sees what is at i + by: [.. along] to [.. along]. Zeros (or token 0) where nothing is."""

    along: str
    by: int
    arity: ClassVar[int] = 1

    def shape(self, *args: Shape) -> Shape:
        (x,) = args
        x[self.along]
        return x

    def dtype(self, *args: DType) -> DType:
        return args[0]
