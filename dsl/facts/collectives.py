"""Collectives of a node under a split, counted from the transitions of its values (`propagate`).

The reduction of weight gradients is not among them: it happens once a step, not once a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from attrs import define, field, frozen

from megaloom.dsl.dims import DType
from megaloom.dsl.ops.attention_core import Attend
from megaloom.dsl.ops.norm import Normalize
from megaloom.dsl.ops.routing import Combine, Route
from megaloom.dsl.sharding_table import SEQUENCES, Split
from megaloom.dsl.value import Value

from .context_exchange import runs_along, shared, turns
from .primitives import Program, Step, origin
from .propagation import (
    NodePlacement,
    PlacedOp,
    Transition,
    TransitionKind,
    Transitions,
    propagate,
)
from .recompute import (
    NO_MODULES,
    RecomputedBy,
    modules_of_node,
    modules_of_ops,
)

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]


@frozen
class Collective:
    """An exchange among the devices of one axis, for one micro-batch.

    elements: of the whole tensor that the group works on, so that in a ring of n each device sends
    elements * (n - 1) / n for an all-gather or a reduce-scatter, and twice that for an all-reduce. Of an all-to-all,
    what one device has, the 1/n that stays included. recomputed_by: the modules that repeat it in the backward pass.
    """

    kind: Kind
    axis: str
    elements: int
    backward: bool
    what: str
    recomputed_by: RecomputedBy = NO_MODULES


def collectives(program: Program, sizes: Mapping[str, int], split: Split) -> tuple[Collective, ...]:
    """The collectives of a node, forward and backward, those of its output's reduction included."""
    return tuple(_Count(program, sizes, split, propagate(program, split)).read())


@define
class _Count:
    program: Program
    sizes: Mapping[str, int]
    split: Split
    placement: NodePlacement
    done: set[tuple[int, Transitions]] = field(factory=set)  # what is moved once serves all who read it so

    def read(self) -> Iterator[Collective]:
        for placed in self.placement.steps:
            for a, moves in zip(placed.step.value.args, placed.reads, strict=True):
                yield from self.moved(placed.step, a, moves)
            yield from self.along(placed)
        yield from self.moved(None, self.program.value, self.placement.output)
        if self.split.cp > 1:
            for step, v in turns(self.program, self.placement.plain):
                yield from self.turn(step, v)

    def turn(self, step: Step, v: Value) -> Iterator[Collective]:
        """Parts of the sequence become parts of the channels or the other way round, and so do gradients."""
        local = step.at(self.sizes, self.split)
        groups = shared(v)
        copies = max(1, self.split.cp // local.of(groups)) if groups and runs_along(step) else 1
        n = copies * local((*step.outer, *v.shape))
        for backward in (False, True):
            yield Collective(
                "all_to_all", "cp", n, backward, "sequence and channels", self.recomputed_by(step, backward)
            )

    def moved(self, step: Step | None, v: Value, moves: Transitions) -> Iterator[Collective]:
        """What the moves of a value exchange, as a primitive reads it."""
        for i, move in enumerate(moves, 1):
            key = id(origin(v)), moves[:i]
            if key in self.done:
                continue
            self.done.add(key)
            if move.kind is TransitionKind.REDUCE_PARTIAL:
                yield from self.reduce(step, v, move)
            elif step is None or id(origin(v)) in self.placement.plain:
                continue  # gradients of weights are added once a step
            elif move.axis == "cp" and runs_along(step):
                continue  # see `turn`
            elif move.kind is TransitionKind.TO_REPLICATE and not (
                isinstance(step.value.op, Attend) and move.axis == "cp"
            ):
                yield from self.enter(step, v, move)
            elif move.kind is TransitionKind.SHARD_TO_REPLICATE:
                n = self.whole(step, v, move)
                yield Collective("all_gather", move.axis, n, False, step.name, self.recomputed_by(step))

    def recomputed_by(self, step: Step, backward: bool = False) -> RecomputedBy:
        """Return the modules that recompute a primitive, and so repeat its collectives; none for a backward pass."""
        return NO_MODULES if backward else modules_of_ops(self.program)[id(step.value)]

    def reduce(self, reader: Step | None, v: Value, move: Transition) -> Iterator[Collective]:
        """Partial sums become whole sums; with sequence parallel, each device's part of them."""
        step = self.placement.partial[id(v.source)]
        made = self.recomputed_by(step) & self.recomputed_by(reader) if reader else modules_of_node(self.program)
        n = step.at(self.sizes, self.split)((*step.outer, *v.source.shape))
        if move.along is None:
            yield Collective("all_reduce", move.axis, n, False, step.name, made)
            return
        yield Collective("reduce_scatter", move.axis, n, False, step.name, made)
        yield Collective("all_gather", move.axis, n, True, step.name)

    def enter(self, step: Step, v: Value, move: Transition) -> Iterator[Collective]:
        """An undivided value is read by divided work: once for each value, as its gradients are added first.

        With sequence parallel it is gathered, and again in the backward pass rather than kept (as megatron-core does);
        what the experts gather over etp they keep, and what is gathered over cp.
        """
        if move.along is None:
            n = step.at(self.sizes, self.split)((*step.outer, *v.shape))
            yield Collective("all_reduce", move.axis, n, True, step.name)
            return
        n = self.whole(step, v, move)
        yield Collective("all_gather", move.axis, n, False, step.name, self.recomputed_by(step))
        if v.dtype is DType.INDEX:
            return
        if move.axis == "tp":
            yield Collective("all_gather", move.axis, n, True, step.name)
        yield Collective("reduce_scatter", move.axis, n, True, step.name)

    def whole(self, step: Step, v: Value, move: Transition) -> int:
        """The elements of what is gathered, on each device afterwards."""
        if move.axis == "tp" and "tp" not in step.axes.values():  # parts of the sequence
            return self.program.held(v.shape, step.outer, self.sizes, self.split, data=True)
        whole = {name for name, axis in step.axes.items() if name == move.along and axis == move.axis}
        return step.at(self.sizes, self.split, whole=whole)((*step.outer, *v.shape))

    def along(self, placed: PlacedOp) -> Iterator[Collective]:
        """What mixes along a divided dim.

        Tokens travel to their experts and back, and so do their gradients.
        """
        step = placed.step
        v = step.value
        match v.op:
            case Attend():
                yield from self.attend(step)
            case Route() | Combine() if self.split.ep > 1:
                sent = v if isinstance(v.op, Route) else v.args[0]
                n = self.program.held(sent.shape, step.outer, self.sizes, self.split)
                what = "dispatch" if sent is v else "combine"
                for backward in (False, True):
                    yield Collective("all_to_all", "ep", n, backward, what, self.recomputed_by(step, backward))
            case Normalize(over):
                n = step.at(self.sizes, self.split)((*step.outer, *v.shape.without(*over)))
                for axis in placed.summed:
                    for backward in (False, True):
                        yield Collective(
                            "all_reduce", axis, n, backward, "statistics", self.recomputed_by(step, backward)
                        )

    def attend(self, step: Step) -> Iterator[Collective]:
        """What the core of attention gathers, and whose gradients it scatters.

        Over cp keys and values, together, which it keeps; recomputed, it gathers them again. Over tp, if there are
        fewer key/value heads than devices, all queries, keys and values: each device has projected an even share
        (megatron-core 0.16.1, attention.py:1398).
        """
        if gathered := step.gathered(self.split):
            local = step.at(self.sizes, self.split, whole=SEQUENCES)
            n = sum(local((*step.outer, *a.shape)) for a in gathered)
            yield Collective("all_gather", "cp", n, False, "keys and values", self.recomputed_by(step))
            yield Collective("reduce_scatter", "cp", n, True, "keys and values")
        copies = [self.program.repeated(a.shape, step.outer, self.split) for a in step.value.args]
        if max(copies) > 1:
            local = step.at(self.sizes, self.split)
            n = sum(
                local((*step.outer, *a.shape)) * self.split.tp // c
                for a, c in zip(step.value.args, copies, strict=True)
            )
            yield Collective("all_gather", "tp", n, False, "queries, keys and values")
            yield Collective("reduce_scatter", "tp", n, True, "queries, keys and values")
