"""Mixture of experts."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen

from megaloom.dsl.combine import Each
from megaloom.dsl.dims import Dim
from megaloom.dsl.errors import ShapeError, did_you_mean
from megaloom.dsl.layer import Layer, is_layer
from megaloom.dsl.ops.routing import Combine, Gate, Route
from megaloom.dsl.ops.weight import weight
from megaloom.dsl.value import Value, apply

from .linear import project

BALANCED = ("sequence", "batch")


@frozen
class MoE(Layer):
    """The sum of each token's top_k experts, weighted by the gate, plus an optional shared layer.

    expert: the layer that is copied `experts` times. score, normalize, scale, groups, top_groups, best: see `Gate`.
    bias: of the router. corrected: a buffer is added to the scores when experts are chosen; training moves it to
    balance the load (DeepSeek-V3, arXiv:2412.19437). shared: a layer that every token passes. balance: the coefficient
    of the load-balancing loss that training adds (Fedus et al., arXiv:2101.03961); it does not change the output.
    balance_over: the tokens over which the load is to be balanced: each sequence (DeepSeek-V2, arXiv:2405.04434), or
    the global batch (Qiu et al., arXiv:2501.11873), for which training runs each forward pass twice.
    """

    expert: Layer = field(validator=is_layer)
    experts: int
    top_k: int
    balance: float = 0.0
    balance_over: Literal["sequence", "batch"] = field(default="sequence", kw_only=True)
    shared: Layer | None = field(default=None, validator=is_layer, kw_only=True)
    score: Literal["softmax", "sigmoid"] = field(default="softmax", kw_only=True)
    normalize: bool = field(default=True, kw_only=True)
    scale: float = field(default=1.0, kw_only=True)
    groups: int = field(default=1, kw_only=True)
    top_groups: int = field(default=1, kw_only=True)
    best: int = field(default=2, kw_only=True)
    corrected: bool = field(default=False, kw_only=True)
    bias: bool = field(default=False, kw_only=True)

    @balance_over.validator
    def _known(self, _: object, over: str) -> None:
        if over not in BALANCED:
            raise ShapeError(f"unknown balance_over {over!r}{did_you_mean(over, BALANCED)}use {' or '.join(BALANCED)}")

    @property
    def gate(self) -> Gate:
        """The op that chooses and weights the experts of each token."""
        return Gate(
            self.top_k,
            score=self.score,
            normalize=self.normalize,
            scale=self.scale,
            groups=self.groups,
            top_groups=self.top_groups,
            best=self.best,
            corrected=self.corrected,
        )

    def body(self, x: Value, /, **side: Value) -> Value:
        n = Dim("experts", self.experts)
        scores = project("router", x, n, bias=self.bias)
        correction = [weight("correction", n, std=0.0, trained=False)] if self.corrected else []
        gate = apply(self.gate, scores, *correction)
        y = apply(Combine(), apply(Route(self.top_k), x, gate) >> Each("experts", self.expert), gate)
        return y + (x >> self.shared.named("shared")) if self.shared else y
