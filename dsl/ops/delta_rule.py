"""The gated delta rule: a linear attention whose state forgets, and is corrected by what it already predicts."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from megaloom.dsl.base_ops import AlongSequence
from megaloom.dsl.dims import Shape, Sizes
from megaloom.dsl.errors import ShapeError, divisors
from megaloom.dsl.op import ALONE, Decoding, Reads
from megaloom.dsl.value import Value
from megaloom.dsl.work_kinds import Extents, WorkKind


@frozen
class DeltaRule(AlongSequence):
    """The gated delta rule: values [batch seq heads head_dim] to a tensor of equal shape.

    Each head has a state s [state head_dim] that starts at zero. At each position s becomes exp(decay) s, then
    s + k (beta (v - sᵀ k))ᵀ, and the output is sᵀ q. Head i reads group i * groups / heads of k and q. Source: Yang et
    al., Gated Delta Networks, arXiv:2412.06464.
    Arguments: v [batch seq heads head_dim], decay and beta [batch seq heads], k and q [batch seq groups state].
    """

    along: str = "seq"
    work_kind: ClassVar[WorkKind] = WorkKind.TRIANGULAR_SCAN
    arity: ClassVar[int] = 5
    channelwise: ClassVar[bool] = True

    def shape(self, *args: Shape) -> Shape:
        v, decay, beta, k, q = args
        v[self.along], k["state"]
        n, g = v["heads"].known, k["groups"].known
        if n % g:
            raise ShapeError(f"{n} heads cannot share {g} groups of keys evenly\ngroups can be {divisors(n)}")
        numbers = v.without("head_dim")
        if decay != numbers or beta != numbers or k != q:
            raise ShapeError(
                f"cannot apply the delta rule to {v} with decay {decay}, beta {beta}, k {k}, q {q}\n"
                f"decay and beta must be {numbers}, and k and q must have equal shapes"
            )
        return v

    def reads(self, out: Value) -> tuple[Reads, ...]:
        along, heads = frozenset({self.along}), ("groups", out.shape["heads"].known)
        return *(Reads(along) for _ in range(3)), Reads(along, heads=heads), Reads(along, heads=heads)

    def flops(self, out: Shape, args: tuple[Shape, ...], size: Sizes) -> int:
        """Return 7 FLOPs per position and element of the state: decay 1, sᵀ k 2, k (..)ᵀ 2, sᵀ q 2."""
        return 7 * size(out) * args[3]["state"].known

    def extents(self, out: Value) -> Extents:
        v, k = out.shape, out.args[3].shape
        return Extents(tuple(v.without(self.along, "head_dim")), (v[self.along],), (k["state"],), (v["head_dim"],))

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return out.args  # the backward pass recomputes the states

    def decoding(self, out: Value, along: str) -> Decoding:
        return Decoding(state=True) if along == self.along else ALONE
