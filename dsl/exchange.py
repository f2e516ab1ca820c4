"""Which collectives a split needs, by inference over the primitives of a node.

A contraction over a divided dim gives partial sums. They stay partial when added to other partial sums, and are reduced
before anything else reads them or they leave the node. An undivided activation that divided work reads has a partial
gradient. Not here: what is exchanged once a step rather than once a micro-batch (the gradients of weights).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from attrs import define, field, frozen

from .attend import Attend
from .dims import DType
from .ops import Dot, Lookup, Normalize, Weight
from .program import Program, Step, origin
from .routing import Combine, Route
from .splits import SEQUENCES, Split, cut, sequential
from .value import Pointwise, Value
from .views import Rename

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]


@frozen
class Collective:
    """An exchange among the devices of one axis, for one micro-batch.

    elements: of the whole tensor that the group works on, so that in a ring of n each device sends
    elements * (n - 1) / n for an all-gather or a reduce-scatter, and twice that for an all-reduce. Of an all-to-all,
    what one device has, the 1/n that stays included. core: selective recompute does it again in the backward pass.
    """

    kind: Kind
    axis: str
    elements: int
    backward: bool
    what: str
    core: bool = False


def collectives(program: Program, sizes: Mapping[str, int], split: Split) -> tuple[Collective, ...]:
    """The collectives of a node, forward and backward, those of its output's reduction included."""
    return tuple(_Inference(program, sizes, split).read())


@define
class _Inference:
    program: Program
    sizes: Mapping[str, int]
    split: Split
    partial: dict[int, tuple[Step, set[str]]] = field(factory=dict)  # what is not reduced yet: its origin and axes
    entered: set[tuple[int, str]] = field(factory=set)

    def read(self) -> Iterator[Collective]:
        for step in self.program.steps:
            v = step.value
            pending = [self.partial.get(id(a.source)) for a in v.args]
            first = pending[0] if pending else None
            if v.op == Pointwise("add") and first and all(p and p[1] == first[1] for p in pending):
                self.partial[id(v)] = first
                continue
            for a in v.args:
                yield from self.reduce(a)
                if not isinstance(a.op, Weight) and a.dtype is DType.COMPUTE:
                    yield from self.enter(step, a)
            yield from self.along(step)
            if axes := {axis for name in _contracted(step) if (axis := self.axis(step, name))}:
                self.partial[id(v)] = step, axes
        yield from self.reduce(self.program.value)

    def axis(self, step: Step, name: str) -> str | None:
        """The axis on which a primitive divides a dim, if it does."""
        axis = step.axes.get(name)
        return axis if axis is not None and self.split.degree(axis) > 1 else None

    def scattered(self, axis: str, v: Value) -> bool:
        """Whether what is whole on each device of the axis is held in parts between the work that needs it whole."""
        return axis == "etp" or (axis == "tp" and self.split.sequence_parallel and sequential(v.shape))

    def reduce(self, v: Value) -> Iterator[Collective]:
        """Partial sums become whole sums; with sequence parallel, each device's part of them."""
        v = v.source
        if id(v) not in self.partial:
            return
        step, axes = self.partial.pop(id(v))
        n = step.at(self.sizes, self.split)((*step.outer, *v.shape))
        for axis in sorted(axes):
            if self.scattered(axis, v):
                yield Collective("reduce_scatter", axis, n, False, step.name)
                yield Collective("all_gather", axis, n, True, step.name)
            else:
                yield Collective("all_reduce", axis, n, False, step.name)

    def enter(self, step: Step, v: Value) -> Iterator[Collective]:
        """An undivided value is read by divided work: once for each value, as its gradients are added first.

        With sequence parallel it is gathered, and again in the backward pass rather than kept (as megatron-core does);
        what the experts gather over etp they keep.
        """
        if isinstance(step.value.op, Route | Combine):
            return  # tokens that travel do not stay divided as they were
        own = cut(self.program.table, step.outer, v.shape).values()
        for axis in sorted(set(step.axes.values()) - set(own) - {"dp", "ep"}):
            key = id(origin(v)), axis
            if self.split.degree(axis) == 1 or key in self.entered:
                continue
            self.entered.add(key)
            n = step.at(self.sizes, self.split)((*step.outer, *v.shape))
            if not self.scattered(axis, v):
                yield Collective("all_reduce", axis, n, True, step.name)
                continue
            yield Collective("all_gather", axis, n, False, step.name)
            if axis != "etp":
                yield Collective("all_gather", axis, n, True, step.name)
            yield Collective("reduce_scatter", axis, n, True, step.name)

    def along(self, step: Step) -> Iterator[Collective]:
        """What mixes along a divided dim.

        Tokens travel to their experts and back, and so do their gradients.
        """
        v = step.value
        match v.op:
            case Attend():
                yield from self.attend(step)
            case Route() | Combine() if self.split.ep > 1:
                sent = v if isinstance(v.op, Route) else v.args[0]
                n = self.program.held(sent.shape, step.outer, self.sizes, self.split)
                for backward in (False, True):
                    yield Collective("all_to_all", "ep", n, backward, "dispatch" if sent is v else "combine")
            case Normalize():
                n = step.at(self.sizes, self.split)((*step.outer, *v.shape.without(*v.op.over)))
                for axis in sorted({axis for name in v.op.over if (axis := self.axis(step, name))}):
                    for backward in (False, True):
                        yield Collective("all_reduce", axis, n, backward, "statistics")
            case Rename() if v.op.new not in self.program.table:
                yield from self.gather(step, v.op.old)

    def attend(self, step: Step) -> Iterator[Collective]:
        """What the core of attention gathers, and whose gradients it scatters.

        Over cp keys and values, together, which it keeps; recomputed, it gathers them again. Over tp, if there are
        fewer key/value heads than devices, all queries, keys and values: each device has projected an even share
        (megatron-core 0.16.1, attention.py:1398).
        """
        if gathered := step.gathered(self.split):
            local = step.at(self.sizes, self.split, whole=SEQUENCES)
            n = sum(local((*step.outer, *a.shape)) for a in gathered)
            yield Collective("all_gather", "cp", n, False, "keys and values", core=True)
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

    def gather(self, step: Step, dim: str) -> Iterator[Collective]:
        """A divided dim becomes whole; the gradient, which every device then has a part of, is reduced by `enter`."""
        x = step.value.args[0]
        if dim in SEQUENCES and self.scattered("tp", x) and "tp" not in step.axes.values() and self.split.tp > 1:
            n = self.program.held(x.shape, step.outer, self.sizes, self.split, data=True)
            yield Collective("all_gather", "tp", n, False, step.name)
        if axis := self.axis(step, dim):
            n = step.at(self.sizes, self.split, whole={dim})((*step.outer, *x.shape))
            yield Collective("all_gather", axis, n, False, step.name)


def _contracted(step: Step) -> tuple[str, ...]:
    """The dims that a primitive sums over."""
    match step.value.op:
        case Dot(over):
            return over
        case Lookup(key):
            return (key,)
    return ()
