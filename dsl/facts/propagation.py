"""Sharding propagation: the placement of every value of a node, and the transitions between placements.

`propagate(program, split)` returns, for each argument of each primitive, the transitions from its placement to the one
in which it is read. `collectives` counts them; the runtime performs them when it runs the body of a layer.

Over an axis a value is Shard(dim) if one of its dims lies on the axis, else Replicate. With sequence parallelism a
value with a sequence and no dim on tp is Shard(seq) over tp. Work is sharded over an axis if a tensor that it touches
is. A contraction over a sharded dim gives a Partial value. It stays Partial when it is added to other Partial values,
and is reduced before another op reads it or it leaves the node. The gradient of a Replicate value that sharded work
reads is Partial too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from functools import lru_cache

from attrs import define, field, frozen

from megaloom.dsl.combine import Each
from megaloom.dsl.dims import Dim, DType
from megaloom.dsl.ops.attention_core import Attend
from megaloom.dsl.ops.dot import Dot
from megaloom.dsl.ops.norm import Normalize
from megaloom.dsl.ops.routing import Combine, Route
from megaloom.dsl.ops.shape import Rename
from megaloom.dsl.ops.weight import Input, Lookup, Weight
from megaloom.dsl.sharding_table import SEQUENCES, Split
from megaloom.dsl.value import Pointwise, Value

from .primitives import Program, Step, origin
from .requirements import Reach, reach_of


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

    parts: the axes over which the result is then sharded. summed: the axes over which the primitive itself adds, for
    the statistics of a norm.
    """

    step: Step
    reads: tuple[Transitions, ...]
    result: Transitions
    parts: frozenset[str]
    summed: tuple[str, ...] = ()


@frozen(eq=False)
class NodePlacement:
    """The primitives of a node in order, and the transitions of its output.

    partial: the contraction that made a Partial value, by the identity of its source. plain: values made of weights
    alone, by identity.
    """

    steps: tuple[PlacedOp, ...]
    output: Transitions
    partial: Mapping[int, Step]
    plain: frozenset[int]


@lru_cache(maxsize=1 << 13)
def propagate(program: Program, split: Split) -> NodePlacement:
    """Return the transitions with which devices under a split compute a node."""
    it = _Inference(program, split)
    steps = tuple(it.read())
    output = it.reduced(program.value)
    return NodePlacement(steps, output, {i: step for i, (step, _) in it.partial.items()}, frozenset(it.plain))


@define
class _Inference:
    program: Program
    split: Split
    partial: dict[int, tuple[Step, frozenset[str]]] = field(factory=dict)  # by the identity of the source
    whole: set[int] = field(factory=set)  # partial sums that something has reduced
    plain: set[int] = field(factory=set)
    owned: dict[int, dict[str, str]] = field(factory=dict)  # what `own` has found
    lying: dict[int, set[str]] = field(factory=dict)  # what `parts` has found

    def read(self) -> Iterator[PlacedOp]:
        for step in self.program.steps:
            v = step.value
            if isinstance(v.op, Weight):
                self.plain.add(id(v))
            if isinstance(v.op, Weight | Input):
                continue
            if v.args and all(id(origin(a)) in self.plain for a in v.args):
                self.plain.add(id(v))
            pending = [self.pending(a) for a in v.args]
            if v.op == Pointwise("add") and pending[0] and all(p and p[1] == pending[0][1] for p in pending):
                self.partial[id(v)] = pending[0]
                yield PlacedOp(step, tuple(() for _ in v.args), (), frozenset(self.parts(v)))
                continue
            yield self.placed(step)
            if axes := self.over(step, _contracted(step)):
                self.partial[id(v)] = step, axes

    def pending(self, v: Value) -> tuple[Step, frozenset[str]] | None:
        """The partial sums that a value is, if nothing has reduced them yet."""
        return None if id(v.source) in self.whole else self.partial.get(id(v.source))

    def placed(self, step: Step) -> PlacedOp:
        """A primitive with its moves."""
        v, reach = step.value, reach_of(step, self.split)
        after = self.parts(v)
        work = {axis for x in (v, *v.args) if id(origin(x)) not in self.plain for axis in self.parts(x)}
        work = (work | {a for a in step.axes.values() if self.divides(a)}) - (self.made(step, reach) - after)
        reads = tuple(
            (*self.reduced(a), *self.entered(step, a, r, work, after)) for a, r in zip(v.args, reach, strict=True)
        )
        taken = tuple(
            Transition(TransitionKind.REPLICATE_TO_SHARD, a, self.dim(v, a))
            for a in ("cp", "tp")
            if a in after & self.whole_over(step, reach)
        )
        over = v.op.over if isinstance(v.op, Normalize) and v.op.groups == 1 else ()
        return PlacedOp(step, reads, taken, frozenset(after), tuple(sorted(self.over(step, over))))

    def whole_over(self, step: Step, reach: tuple[Reach, ...]) -> set[str]:
        """The axes over which each device computes more of a result than its part."""
        v = step.value
        if isinstance(v.op, Rename) and self.own(v) != self.own(v.args[0]):
            return set(self.own(v).values()) - set(self.own(v.args[0]).values()) | self.made(step, reach)
        return self.made(step, reach[:1] if isinstance(v.op, Attend) else reach)

    def made(self, step: Step, reach: tuple[Reach, ...]) -> set[str]:
        """The axes whose parts arguments are made whole of."""
        return {axis for a, r in zip(step.value.args, reach, strict=False) for axis, _ in self.reached(step, a, r)}

    def reduced(self, v: Value) -> Transitions:
        """The reduction of a value, if it is partial sums."""
        if id(v.source) not in self.partial:
            return ()
        self.whole.add(id(v.source))
        axes = sorted(self.partial[id(v.source)][1])
        return tuple(
            Transition(TransitionKind.REDUCE_PARTIAL, a, self.dim(v, a) if a in self.parts(v) or a == "etp" else None)
            for a in axes
        )

    def entered(self, step: Step, a: Value, reach: Reach, work: set[str], after: set[str]) -> Iterator[Transition]:
        """From how an argument lies to how it is read, once it is no partial sum."""
        if isinstance(step.value.op, Route | Combine):
            return  # tokens that travel do not stay divided as they were
        parts, plain = self.parts(a), id(origin(a)) in self.plain
        reached = dict(self.reached(step, a, reach))
        for axis in ("tp", "etp", "cp"):
            if axis in reached:
                kind = TransitionKind.TO_REPLICATE if axis in after else TransitionKind.SHARD_TO_REPLICATE
                kind = kind if reached[axis] else TransitionKind.SHARD_TO_ZERO_FILLED
                yield Transition(kind, axis, self.dim(a, axis))
            elif axis in parts:
                if axis == "tp" and self.scattered(a) and "tp" in step.axes.values():
                    yield Transition(TransitionKind.TO_REPLICATE, axis, self.dim(a, axis))
            elif axis == "cp" and plain:
                if self.divides("cp") and "cp" not in work and id(step.value) not in self.plain:
                    yield Transition(TransitionKind.REPLICATE_WEIGHT, "cp")
            elif axis in work and a.dtype is not DType.INDEX:
                yield Transition(
                    TransitionKind.TO_REPLICATE, axis, self.dim(a, axis) if axis == "etp" and not plain else None
                )
            elif axis in work and axis == "tp" and "tp" not in step.axes.values() and not reach and _sequence(a):
                yield Transition(TransitionKind.REPLICATE_TO_SHARD, axis, _sequence(a))
        if reach.heads and "tp" in step.axes.values() and "tp" not in self.own(a).values():
            yield Transition(TransitionKind.REPLICATE_TO_HEADS, "tp", *reach.heads)

    def reached(self, step: Step, a: Value, reach: Reach) -> Iterator[tuple[str, bool]]:
        """The axes whose parts an argument is made whole of, for a primitive that needs more than its own part.

        Whether it needs the others' numbers, or no more than to know its place among them.
        """
        for axis in self.parts(a):
            if axis == "tp" and self.scattered(a) and "tp" in step.axes.values():
                continue
            if (name := self.dim(a, axis)) in reach.dims:
                yield axis, name in reach.whole

    def divides(self, axis: str) -> bool:
        """Whether tensors are divided over this axis."""
        return axis not in ("dp", "ep") and self.split.degree(axis) > 1

    def own(self, v: Value) -> dict[str, str]:
        """The dims of a value on axes that divide them."""
        if id(v) not in self.owned:
            axes = _cuts(self.program).get(id(v)) or self.program.table.axes((), v.shape)
            self.owned[id(v)] = {name: axis for name, axis in axes.items() if self.divides(axis)}
        return self.owned[id(v)]

    def parts(self, v: Value) -> set[str]:
        """The axes over which a value lies in parts."""
        if id(v) not in self.lying:
            axes = set(self.own(v).values())
            if _sequence(v) is not None:
                axes |= {"cp"} if self.divides("cp") else set()
                axes |= {"tp"} if self.divides("tp") and self.scattered(v) else set()
            self.lying[id(v)] = axes
        return self.lying[id(v)]

    def scattered(self, v: Value) -> bool:
        """Whether a value lies in parts of its sequence over tp."""
        own = set(self.own(v).values())
        return (
            self.split.sequence_parallel and v.dtype is not DType.INDEX and "tp" not in own and _sequence(v) is not None
        )

    def dim(self, v: Value, axis: str) -> str | None:
        """The dim along which a value lies in parts over an axis."""
        found = next((name for name, a in self.own(v).items() if a == axis), None)
        return found or _sequence(v)

    def over(self, step: Step, names: tuple[str, ...]) -> frozenset[str]:
        """The axes over which what is summed along these dims is a partial sum."""
        axes = {step.axes[name] for name in names if name in step.axes}
        if (
            SEQUENCES.intersection(names)
            and "tp" not in step.axes.values()
            and any(map(self.scattered, step.value.args))
        ):
            axes.add("tp")
        return frozenset(filter(self.divides, axes))


@lru_cache(maxsize=1 << 12)
def _cuts(program: Program) -> dict[int, dict[str, str]]:
    """The dims of each value of a program that may be divided, and their axes; by identity."""
    outers = {id(s.value): s.outer for s in program.steps}

    def around(v: Value) -> tuple[Dim, ...]:
        o = origin(v)
        return outers.get(id(o.source), ())[:-1] if isinstance(o.op, Each) else outers.get(id(o), ())

    return {id(v): program.table.axes(around(v), v.shape) for s in program.steps for v in (s.value, *s.value.args)}


def _sequence(v: Value) -> str | None:
    """The dim of a value that has a part for each position of a sequence; slots are for its tokens."""
    return next((d.name for d in v.shape if d.name in SEQUENCES or any(o.name in SEQUENCES for o in d.of)), None)


def _contracted(step: Step) -> tuple[str, ...]:
    """The dims that a primitive sums over."""
    match step.value.op:
        case Dot(over):
            return over
        case Lookup(key):
            return (key,)
    return ()
