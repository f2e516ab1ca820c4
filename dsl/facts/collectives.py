"""Collectives of a node under a split, counted from the transitions of its values (`propagate`).

The reduction of weight gradients is not among them: it happens once a step, not once a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from attrs import define, evolve, field, frozen

from megaloom.dsl.dims import DType
from megaloom.dsl.sharding_table import SEQUENCES, Split
from megaloom.dsl.value import Value
from megaloom.dsl.work_kinds import WorkKind

from .context_exchange import channel_exchanges, divides_channels, runs_along, shared_channels
from .placement import PARTIAL, Communication, NodePlacement, PlacedOp, Transition, Transitions
from .primitives import Program, Step, origin
from .propagation import propagate
from .recompute import NO_MODULES, RecomputedBy, modules_of_node, modules_of_ops

Kind = Communication | Literal["all_to_all"]


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


def collectives(
    program: Program, sizes: Mapping[str, int], split: Split, *, gathers: bool = False
) -> tuple[Collective, ...]:
    """Return the forward and backward collectives of a node, including the reduction of its output.

    gathers: see `Costs.gathers_sequence`.
    """
    return tuple(_Count(program, sizes, split, propagate(program, split), gathers).read())


def gathers_sequence(program: Program, split: Split) -> bool:
    """Return whether each context-parallel rank runs the convolutions and scans of a body along whole sequences."""
    along = split.cp > 1 and any(runs_along(step) for step in program.steps)
    return along and not divides_channels(program, propagate(program, split).weights_only, split)


@define
class _Count:
    program: Program
    sizes: Mapping[str, int]
    split: Split
    placement: NodePlacement
    gathers: bool  # sequences of convolutions and scans, where cp does not divide their channels
    performed: set[tuple[int, Transitions]] = field(factory=set)  # a transition is performed once for all its readers

    def read(self) -> Iterator[Collective]:
        for placed in self.placement.steps:
            for a, transitions in zip(placed.step.value.args, placed.reads, strict=True):
                yield from self.transition_collectives(placed.step, a, transitions)
            yield from self.along(placed)
        yield from self.transition_collectives(None, self.program.value, self.placement.output)
        if self.split.cp > 1 and not self.gathers:
            for step, v in channel_exchanges(self.program, self.placement.weights_only):
                yield from self.channel_exchange(step, v)

    def channel_exchange(self, step: Step, v: Value) -> Iterator[Collective]:
        """Yield the all-to-alls between sequence shards and channel shards, forward and backward."""
        local = step.at(self.sizes, self.split)
        groups = shared_channels(v)
        copies = max(1, self.split.cp // local.of(groups)) if groups and runs_along(step) else 1
        n = copies * local((*step.outer, *v.shape))
        for backward in (False, True):
            yield Collective(
                "all_to_all", "cp", n, backward, "sequence and channels", self.recomputed_by(step, backward)
            )

    def transition_collectives(self, step: Step | None, v: Value, transitions: Transitions) -> Iterator[Collective]:
        """Yield the collectives of the transitions of a value before a primitive reads it."""
        for i, transition in enumerate(transitions, 1):
            key = id(origin(v)), transitions[:i]
            if key in self.performed:
                continue
            self.performed.add(key)
            if transition.source == PARTIAL:
                yield from self.reduce(step, v, transition)
            elif step is None or id(origin(v)) in self.placement.weights_only:
                continue  # gradients of weights are added once a step
            elif transition.axis == "cp" and runs_along(step) and not self.gathers:
                continue  # see `channel_exchange`
            elif transition.axis == "cp" and step.value.op.work_kind is WorkKind.ATTENTION:
                continue  # see `attend`
            else:
                yield from self.enter(step, v, transition)

    def recomputed_by(self, step: Step, backward: bool = False) -> RecomputedBy:
        """Return the modules that recompute a primitive, and so repeat its collectives; none for a backward pass."""
        return NO_MODULES if backward else modules_of_ops(self.program)[id(step.value)]

    def reduce(self, reader: Step | None, v: Value, transition: Transition) -> Iterator[Collective]:
        """Yield the collectives that reduce a Partial value."""
        step = self.placement.partial[id(v.source)]
        recomputed_by = (
            self.recomputed_by(step) & self.recomputed_by(reader) if reader else modules_of_node(self.program)
        )
        n = step.at(self.sizes, self.split)((*step.outer, *v.source.shape))
        return _exchanges(transition, n, step.name, recomputed_by)

    def enter(self, step: Step, v: Value, transition: Transition) -> Iterator[Collective]:
        """Yield the collectives of a value that a primitive reads in another placement, and of its gradient.

        With sequence parallelism a value that is gathered for sharded work is gathered again in the backward pass
        instead of being saved, as megatron-core does. Values gathered over etp or cp are saved.
        """
        n = self.whole(step, v, transition)
        for exchange in _exchanges(transition, n, step.name, self.recomputed_by(step)):
            if exchange.backward and exchange.kind == "reduce_scatter" and exchange.axis == "tp":
                yield evolve(exchange, kind="all_gather")
            if not (exchange.backward and v.dtype is DType.INDEX):
                yield exchange

    def whole(self, step: Step, v: Value, transition: Transition) -> int:
        """Return the elements of a value on each device, whole along the dim that a transition gathers."""
        shard = transition.shard
        if shard and transition.axis == "tp" and "tp" not in step.axes.values():  # shards of the sequence
            return self.program.local_elements(v.shape, step.outer, self.sizes, self.split, data=True)
        whole = {shard.dim} if shard and step.axes.get(shard.dim) == transition.axis else ()
        return step.at(self.sizes, self.split, whole=whole)((*step.outer, *v.shape))

    def along(self, placed: PlacedOp) -> Iterator[Collective]:
        """Yield the collectives of a primitive that mixes along a sharded dim: attention, dispatch, combine, a norm."""
        step = placed.step
        v = step.value
        if v.op.work_kind is WorkKind.ATTENTION:
            yield from self.attend(step)
        elif v.op.work_kind.is_exchange and self.split.ep > 1:
            dispatch = v.op.work_kind is WorkKind.DISPATCH
            tokens, what = (v, "dispatch") if dispatch else (v.args[0], "combine")
            n = self.program.local_elements(tokens.shape, step.outer, self.sizes, self.split)
            for backward in (False, True):
                yield Collective("all_to_all", "ep", n, backward, what, self.recomputed_by(step, backward))
        yield from self.statistics(placed)

    def statistics(self, placed: PlacedOp) -> Iterator[Collective]:
        """Yield the all-reduces of the statistics of a norm or a loss, one number for each index besides their dims.

        Their gradients are exchanged too, unless each device computes the whole result: the same loss of each token.
        """
        step = placed.step
        for reads in (r for r in step.reads if r.statistics):
            kept = step.value.shape.without(*reads.statistics)
            n, what = step.at(self.sizes, self.split)((*step.outer, *kept)), step.name
            inside = kept != step.value.shape  # its result has the dims of the statistics
            for axis in placed.statistics_axes:
                named = "statistics" if inside else what
                for _ in range(reads.exchanges):
                    yield Collective("all_reduce", axis, n, False, named, self.recomputed_by(step))
                if inside or any(t.axis == axis for t in placed.result):  # each device reads its part of the sequence
                    yield Collective("all_reduce", axis, n, True, named)

    def attend(self, step: Step) -> Iterator[Collective]:
        """Yield the gathers of the attention core, and the reduce-scatters of their gradients.

        Over cp it gathers keys and values together and saves them; under recompute it gathers them twice. Over tp, if
        there are fewer key/value heads than devices, it gathers queries, keys and values, because each device projects
        an even share of them (megatron-core 0.16.1, attention.py:1398).
        """
        if gathered := step.gathered(self.split):
            local = step.at(self.sizes, self.split, whole=SEQUENCES)
            n = sum(local((*step.outer, *a.shape)) for a in gathered)
            yield Collective("all_gather", "cp", n, False, "keys and values", self.recomputed_by(step))
            yield Collective("reduce_scatter", "cp", n, True, "keys and values")
        copies = [self.program.head_copies(a.shape, step.outer, self.split) for a in step.value.args]
        if max(copies) > 1:
            local = step.at(self.sizes, self.split)
            n = sum(
                local((*step.outer, *a.shape)) * self.split.tp // c
                for a, c in zip(step.value.args, copies, strict=True)
            )
            yield Collective("all_gather", "tp", n, False, "queries, keys and values")
            yield Collective("reduce_scatter", "tp", n, True, "queries, keys and values")


def _exchanges(transition: Transition, elements: int, what: str, recomputed_by: RecomputedBy) -> Iterator[Collective]:
    """Yield the collective of a transition, if it has one, and that of its gradient."""
    for t, backward in ((transition, False), (transition.gradient, True)):
        if kind := t.communication:
            yield Collective(kind, t.axis, elements, backward, what, NO_MODULES if backward else recomputed_by)
