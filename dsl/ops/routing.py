"""Routing of a mixture of experts: gate, dispatch of tokens to experts, combination of their results."""

from __future__ import annotations

from fractions import Fraction
from typing import ClassVar, Literal

from attrs import field, frozen

from megaloom.dsl.dims import Dim, Shape
from megaloom.dsl.errors import ShapeError, did_you_mean, divisors
from megaloom.dsl.op import PLAIN, Op, Reads
from megaloom.dsl.value import Value
from megaloom.dsl.work_kinds import WorkKind

SCORES = ("softmax", "sigmoid")


@frozen
class Gate(Op):
    """The weight of each expert for each token: positive for the token's top_k experts, zero for the others.

    Scores become positive by a softmax over all experts or by a sigmoid. normalize: the weights of a token are divided
    by their sum; with a softmax this is the softmax of the chosen scores. scale: a factor on the weights. groups: the
    experts are in equal groups, and only the top_groups groups with the largest sum of their `best` scores take part
    (DeepSeek-V2, arXiv:2405.04434). corrected: a second argument [experts] is added to the scores when experts are
    chosen, not when they are weighted (DeepSeek-V3, arXiv:2412.19437).
    """

    top_k: int
    score: Literal["softmax", "sigmoid"] = field(default="softmax", kw_only=True)
    normalize: bool = field(default=True, kw_only=True)
    scale: float = field(default=1.0, kw_only=True)
    groups: int = field(default=1, kw_only=True)
    top_groups: int = field(default=1, kw_only=True)
    best: int = field(default=2, kw_only=True)
    corrected: bool = field(default=False, kw_only=True)
    work_kind: ClassVar[WorkKind] = WorkKind.GATE

    @score.validator
    def _known(self, _: object, score: str) -> None:
        if score not in SCORES:
            raise ShapeError(f"unknown score {score!r}{did_you_mean(score, SCORES)}score can be {', '.join(SCORES)}")

    def shape(self, *args: Shape) -> Shape:
        scores, *correction = args
        experts = scores["experts"]
        n = experts.known
        if not 1 <= self.top_k <= n:
            raise ShapeError(f"cannot choose {self.top_k} of {n} experts\ntop_k can be 1 to {n}")
        if self.groups < 1 or n % self.groups:
            raise ShapeError(f"cannot divide {n} experts into {self.groups} groups\ngroups can be {divisors(n)}")
        if not 1 <= self.top_groups <= self.groups:
            raise ShapeError(
                f"cannot choose {self.top_groups} of {self.groups} groups\ntop_groups can be 1 to {self.groups}"
            )
        each = n // self.groups
        if self.top_k > each * self.top_groups:
            raise ShapeError(
                f"cannot choose {self.top_k} experts: groups={self.groups} and top_groups={self.top_groups} leave "
                f"{each * self.top_groups}\ntop_k can be 1 to {each * self.top_groups}"
            )
        if self.groups > 1 and not 1 <= self.best <= each:
            raise ShapeError(
                f"cannot rank groups by their {self.best} best scores: each group has {each} of the {n} experts\n"
                f"use best={each}, or fewer groups"
            )
        if [c.dims for c in correction] != [(experts,)] * self.corrected:
            raise ShapeError(
                f"Gate(corrected={self.corrected}) of scores {scores} needs "
                + (f"a correction {Shape((experts,))}" if self.corrected else "no second argument")
            )
        return scores

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return (Reads(frozenset({"experts"})),) * len(out.args)

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return (out,)


@frozen
class Route(Op):
    """Dispatch each token to its top_k experts: [batch seq embed] to [experts slots embed].

    Each expert has tokens * top_k / experts slots: as many as balanced routing fills. Arguments: x [batch seq embed],
    gate [batch seq experts]. The one dim of x that the gate lacks may have any name. Raises ShapeError if x has more.
    """

    top_k: int
    work_kind: ClassVar[WorkKind] = WorkKind.DISPATCH
    arity: ClassVar[int] = 2

    def shape(self, *args: Shape) -> Shape:
        x, gate = args
        experts, channels = gate["experts"], [d for d in x if d.name not in gate]
        if len(channels) != 1:
            raise ShapeError(f"cannot route {x} by a gate {gate}: x must have exactly one dim that the gate lacks")
        slots = Dim("slots", None, Fraction(self.top_k, experts.known), x.without(channels[0].name).dims)
        return Shape((experts, slots, *channels))

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return PLAIN, PLAIN  # its all-to-all changes the placement of tokens

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return ()


@frozen
class Combine(Op):
    """The sum of each token's expert results, weighted by the gate: [experts slots embed] to [batch seq embed].

    Arguments: y [experts slots embed], gate [batch seq experts]. y is not saved, because megatron-core applies the
    weights before the experts' last product, which is linear (0.16.1, transformer/moe/experts.py: permuted_probs).
    """

    work_kind: ClassVar[WorkKind] = WorkKind.COMBINE
    arity: ClassVar[int] = 2

    def shape(self, *args: Shape) -> Shape:
        y, gate = args
        return Shape((*gate.without("experts"), *y.without("experts", "slots")))

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return PLAIN, PLAIN  # its all-to-all changes the placement of tokens

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return out.args[1:]
