"""Placements of the values of a node as data: each primitive with the transitions of its arguments and its result."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from attrs import frozen

from .primitives import Step


class TransitionKind(Enum):
    """A change of the placement of a tensor over one axis, in the terms of PyTorch's DTensor, and of its gradient.

    The text of a member is the transition of the tensor; then, after the semicolon, that of its gradient.
    """

    REDUCE_PARTIAL = "Partial → Replicate, or along a dim Partial → Shard(dim); Replicate, or Shard(dim) → Replicate"
    TO_REPLICATE = "Replicate or Shard(dim) → Replicate, for sharded work; Partial → Replicate, or Partial → Shard(dim)"
    SHARD_TO_REPLICATE = "Shard(dim) → Replicate, for work that all devices repeat; Replicate → Shard(dim)"
    REPLICATE_TO_SHARD = "Replicate → Shard(dim); its shard, with zeros in the other shards"
    SHARD_TO_ZERO_FILLED = "Shard(dim) → the whole dim with zeros in the other shards; Replicate → Shard(dim)"
    REPLICATE_TO_HEADS = "Replicate → those key/value heads that the heads of the device share; zeros in the others"
    REPLICATE_WEIGHT = "Replicate, a weight for work that all devices repeat; divided by the number of devices"


@frozen
class Transition:
    """A change of placement over one axis. along: the sharded dim. heads: of REPLICATE_TO_HEADS, the query heads."""

    kind: TransitionKind
    axis: str
    along: str | None = None
    heads: int = 0


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
