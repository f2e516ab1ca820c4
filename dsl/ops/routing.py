"""Sending tokens to experts, and bringing their results back."""

from __future__ import annotations

from fractions import Fraction
from typing import ClassVar, Literal

from attrs import field, frozen

from megaloom.dsl.dims import Dim, Shape
from megaloom.dsl.errors import ShapeError, divisors, nearest
from megaloom.dsl.value import Op, Value

SCORES = ("softmax", "sigmoid")


@frozen
class Gate(Op):
    """The weights of a token's experts: those of its top_k scores, zero for the others.

    The scores of the argument are made positive by a softmax over all experts or a sigmoid of each. normalize: the
    weights of a token add up to 1 (under a softmax: the softmax of the chosen scores alone), before they are scaled.
    groups: the experts are in as many groups, of which only the top_groups with the largest sum of their `best` scores
    are chosen from (DeepSeek-V2, arXiv:2405.04434). corrected: a second argument [experts] is added to the scores for
    choosing, not for weighting (DeepSeek-V3, arXiv:2412.19437).
    """

    top_k: int
    score: Literal["softmax", "sigmoid"] = field(default="softmax", kw_only=True)
    normalize: bool = field(default=True, kw_only=True)
    scale: float = field(default=1.0, kw_only=True)
    groups: int = field(default=1, kw_only=True)
    top_groups: int = field(default=1, kw_only=True)
    best: int = field(default=2, kw_only=True)
    corrected: bool = field(default=False, kw_only=True)

    @score.validator
    def _known(self, _: object, score: str) -> None:
        if score not in SCORES:
            raise ShapeError(f"no score {score!r}{nearest(score, SCORES)}there are {', '.join(SCORES)}")

    def shape(self, *args: Shape) -> Shape:
        scores, *correction = args
        experts = scores["experts"]
        n = experts.known
        if not 1 <= self.top_k <= n:
            raise ShapeError(f"cannot choose {self.top_k} of {n} experts\ntop_k can be 1 to {n}")
        if self.groups < 1 or n % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ShapeError(
                f"cannot choose from {self.top_groups} of {self.groups} groups of {n} experts\n"
                f"groups can be {divisors(n)}, top_groups 1 to groups"
            )
        each = n // self.groups
        if self.top_k > each * self.top_groups:
            raise ShapeError(
                f"cannot choose {self.top_k} experts from {self.top_groups} groups of {each}\n"
                f"top_k can be 1 to {each * self.top_groups}"
            )
        if self.groups > 1 and not 1 <= self.best <= each:
            raise ShapeError(f"a group of {each} experts has no {self.best} best scores\nbest can be 1 to {each}")
        if [c.dims for c in correction] != [(experts,)] * self.corrected:
            raise ShapeError(f"a gate of {scores} takes a correction of {Shape((experts,))} if it is corrected")
        return scores

    def keeps(self, out: Value) -> tuple[Value, ...]:
        return (out,)


@frozen
class Route(Op):
    """Send each token to its top_k experts: [batch seq embed] to [experts slots embed].

    Each expert has as many slots as balanced routing fills: tokens * top_k / experts. Arguments: x [batch seq embed],
    gate [batch seq experts].
    """

    top_k: int
    arity: ClassVar[int] = 2

    def shape(self, *args: Shape) -> Shape:
        x, gate = args
        experts = gate["experts"]
        slots = Dim("slots", None, Fraction(self.top_k, experts.known), x.without("embed").dims)
        return Shape((experts, slots, x["embed"]))


@frozen
class Combine(Op):
    """Bring each token's results back and add them, each times its gate: [experts slots embed] to [batch seq embed].

    Arguments: y [experts slots embed], gate [batch seq experts]. The results are not kept: megatron-core weights what
    enters the experts' last product instead (0.16.1, transformer/moe/experts.py: permuted_probs), which is linear.
    """

    arity: ClassVar[int] = 2

    def shape(self, *args: Shape) -> Shape:
        y, gate = args
        return Shape((*gate.without("experts"), y["embed"]))

    def keeps(self, out: Value) -> tuple[Value, ...]:
        return out.args[1:]
