"""Placements of a tensor over one axis, the transitions between them, and the placements of the values of a node.

A placement says what each device of an axis has of a tensor, and thereby what it has of the gradient: `dual`. A
transition changes a placement; its gradient is the transition between the duals, the other way round.
`OPERATION_BY_PAIR` says what the devices do for it. The package spmd-types has the same four values. PyTorch's DTensor
has no Invariant, so that one all-gather would have two gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import frozen

from .primitives import Step


@frozen
class Replicate:
    """Each device has the whole tensor and does other work with it than the others. The gradient is Partial."""


@frozen
class Invariant:
    """Each device has the whole tensor and does the same work with it. The gradient is Invariant."""


@frozen
class Partial:
    """Each device has one term of a sum. The gradient is Replicate."""


@frozen
class Shard:
    """Each device has a part of one dim. The gradient is sharded alike.

    zigzag: whether device r of n has chunks r and 2 n - 1 - r of 2 n, rather than the r-th of n parts.
    heads: of query heads, which lie evenly over the devices. Each device then has those indices of the dim that its
    heads share, and others may have them too. 0: each index is on one device.
    """

    dim: str
    zigzag: bool = False
    heads: int = 0

    @classmethod
    def over(cls, axis: str, dim: str) -> Shard:
        """Return the placement over an axis of a tensor with a dim on it. Only cp shards in zigzag order."""
        return cls(dim, zigzag=axis == "cp")


Placement = Replicate | Invariant | Shard | Partial
REPLICATE, INVARIANT, PARTIAL = Replicate(), Invariant(), Partial()

Communication = Literal["all_reduce", "reduce_scatter", "all_gather"]
# slice: take the own shard. zero_fill: zeros in the other shards. divide: by the number of devices.
Operation = Communication | Literal["slice", "zero_fill", "divide", "none"]
OPERATION_BY_PAIR: Mapping[tuple[type[Placement], type[Placement]], Operation] = {
    (Partial, Replicate): "all_reduce",
    (Partial, Invariant): "all_reduce",
    (Partial, Shard): "reduce_scatter",
    (Shard, Replicate): "all_gather",
    (Shard, Invariant): "all_gather",
    (Shard, Partial): "zero_fill",
    (Replicate, Shard): "slice",
    (Invariant, Shard): "slice",
    (Replicate, Partial): "divide",
    (Invariant, Partial): "divide",
    (Replicate, Invariant): "none",
    (Invariant, Replicate): "none",
}


def dual(placement: Placement) -> Placement:
    """Return the placement of the gradient of a tensor."""
    match placement:
        case Replicate():
            return PARTIAL
        case Partial():
            return REPLICATE
        case Invariant() | Shard():
            return placement


@frozen
class Transition:
    """A change of the placement of a tensor over one axis."""

    axis: str
    source: Placement
    target: Placement

    @property
    def gradient(self) -> Transition:
        """Return the transition of the gradient."""
        return Transition(self.axis, dual(self.target), dual(self.source))

    @property
    def operation(self) -> Operation:
        """Return what the devices do."""
        if self.source == self.target:
            return "none"
        return OPERATION_BY_PAIR[type(self.source), type(self.target)]

    @property
    def communication(self) -> Communication | None:
        """Return the collective among the devices, if there is one."""
        match self.operation:
            case "all_reduce" | "reduce_scatter" | "all_gather" as communication:
                return communication
        return None

    @property
    def shard(self) -> Shard | None:
        """Return the sharded one of the two placements, if one is."""
        return next((p for p in (self.source, self.target) if isinstance(p, Shard)), None)


Transitions = tuple[Transition, ...]


@frozen(eq=False)
class PlacedOp:
    """A primitive with the transitions of each argument before it, and of its result after it.

    sharded_axes: the axes over which the result is then sharded.
    statistics_axes: the axes over which a norm or a cross-entropy adds its statistics.
    """

    step: Step
    reads: tuple[Transitions, ...]
    result: Transitions
    sharded_axes: frozenset[str]
    statistics_axes: tuple[str, ...] = ()


@frozen(eq=False)
class NodePlacement:
    """The primitives of a node in order, and the transitions of its output.

    partial: the contraction that computes each Partial value, by the identity of its source.
    weights_only: values computed from weights alone, by identity.
    """

    steps: tuple[PlacedOp, ...]
    output: Transitions
    partial: Mapping[int, Step]
    weights_only: frozenset[int]
