"""The gated delta rule: a linear attention whose state forgets, and is corrected by what it already predicts."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from megaloom.dsl.base_ops import GroupedScan
from megaloom.dsl.dims import Shape
from megaloom.dsl.errors import ShapeError, divisors
from megaloom.dsl.value import Value
from megaloom.dsl.work_kinds import WorkKind


@frozen
class DeltaRule(GroupedScan):
    """The gated delta rule: values [batch seq heads head_dim] to a tensor of equal shape.

    Each head has a state s [state head_dim] that starts at zero. At each position s becomes exp(decay) s, then
    s + k (beta (v - sᵀ k))ᵀ, and the output is sᵀ q. Head i reads group i * groups / heads of k and q. Source: Yang et
    al., Gated Delta Networks, arXiv:2412.06464.
    Arguments: v [batch seq heads head_dim], decay and beta [batch seq heads], k and q [batch seq groups state].
    """

    work_kind: ClassVar[WorkKind] = WorkKind.TRIANGULAR_SCAN
    arity: ClassVar[int] = 5

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

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return out.args  # the backward pass recomputes the states
