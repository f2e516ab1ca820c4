"""Where a split makes devices exchange, inferred once over the primitives of a node.

Protocol: `placement(program, split)` says of each argument of each primitive which moves it takes from how it lies to
how it is read. Who counts exchanges (`exchange`) and who carries them out (the runtime, for a layer's own body) read
the same moves.

Over each axis a value lies in parts, if one of its dims is divided there, or whole on every device. With sequence
parallel, what has a sequence and no dim on tp lies in parts along it over tp as well. Work is divided over an axis if
a tensor that it touches lies in parts there. A contraction over a divided dim gives partial sums: they stay partial
when added to other partial sums, and are reduced before anything else reads them or they leave the node. The gradient
of what is whole and read by divided work is a partial sum likewise.
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


class How(Enum):
    """What a move does to a tensor, and to its gradient on the way back. `along`: the dim that lies in parts."""

    REDUCE = "partial sums are added, of which each device keeps its part if along a dim; back: copied, or gathered"
    ENTER = "what is whole, or parts gathered, is read by divided work; back: added, or added and kept in parts"
    GATHER = "parts become whole, for work that all devices do alike; back: each takes its part"
    TAKE = "each device goes on with its part of what all have; back: zeros in the other parts"
    SPREAD = "a part in its place among zeros, where the place matters and the others do not; back: each takes its part"
    NARROW = "of heads that several others share, those that this device's share; back: zeros in the others"
    SHARE = "a weight is read by work that all devices do alike; back: its share, as the shares will be added"


@frozen
class Move:
    """One of the moves, over one axis."""

    how: How
    axis: str
    along: str | None = None
    heads: int = 0  # of NARROW: how many share those along


Moves = tuple[Move, ...]


@frozen(eq=False)
class Placed:
    """A primitive with the moves of each of its arguments before it, and of its result after it.

    parts: the axes over which the result then lies in parts. summed: those over which the primitive adds within, the
    statistics of a norm.
    """

    step: Step
    reads: tuple[Moves, ...]
    result: Moves
    parts: frozenset[str]
    summed: tuple[str, ...] = ()


@frozen(eq=False)
class Placement:
    """The primitives of a node in order, and the moves of its output.

    partial: the contraction whose partial sums a value is, by the identity of its source. plain: what is made of
    weights alone, by identity.
    """

    steps: tuple[Placed, ...]
    output: Moves
    partial: Mapping[int, Step]
    plain: frozenset[int]


@lru_cache(maxsize=1 << 13)
def placement(program: Program, split: Split) -> Placement:
    """Where devices divided like this must exchange to compute a node."""
    it = _Inference(program, split)
    steps = tuple(it.read())
    output = it.reduced(program.value)
    return Placement(steps, output, {i: step for i, (step, _) in it.partial.items()}, frozenset(it.plain))


@define
class _Inference:
    program: Program
    split: Split
    partial: dict[int, tuple[Step, frozenset[str]]] = field(factory=dict)  # by the identity of the source
    whole: set[int] = field(factory=set)  # partial sums that something has reduced
    plain: set[int] = field(factory=set)
    owned: dict[int, dict[str, str]] = field(factory=dict)  # what `own` has found
    lying: dict[int, set[str]] = field(factory=dict)  # what `parts` has found

    def read(self) -> Iterator[Placed]:
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
                yield Placed(step, tuple(() for _ in v.args), (), frozenset(self.parts(v)))
                continue
            yield self.placed(step)
            if axes := self.over(step, _contracted(step)):
                self.partial[id(v)] = step, axes

    def pending(self, v: Value) -> tuple[Step, frozenset[str]] | None:
        """The partial sums that a value is, if nothing has reduced them yet."""
        return None if id(v.source) in self.whole else self.partial.get(id(v.source))

    def placed(self, step: Step) -> Placed:
        """A primitive with its moves."""
        v, reach = step.value, reach_of(step, self.split)
        after = self.parts(v)
        work = {axis for x in (v, *v.args) if id(origin(x)) not in self.plain for axis in self.parts(x)}
        work = (work | {a for a in step.axes.values() if self.divides(a)}) - (self.made(step, reach) - after)
        reads = tuple(
            (*self.reduced(a), *self.entered(step, a, r, work, after)) for a, r in zip(v.args, reach, strict=True)
        )
        taken = tuple(
            Move(How.TAKE, a, self.dim(v, a)) for a in ("cp", "tp") if a in after & self.whole_over(step, reach)
        )
        over = v.op.over if isinstance(v.op, Normalize) and v.op.groups == 1 else ()
        return Placed(step, reads, taken, frozenset(after), tuple(sorted(self.over(step, over))))

    def whole_over(self, step: Step, reach: tuple[Reach, ...]) -> set[str]:
        """The axes over which each device computes more of a result than its part."""
        v = step.value
        if isinstance(v.op, Rename) and self.own(v) != self.own(v.args[0]):
            return set(self.own(v).values()) - set(self.own(v.args[0]).values()) | self.made(step, reach)
        return self.made(step, reach[:1] if isinstance(v.op, Attend) else reach)

    def made(self, step: Step, reach: tuple[Reach, ...]) -> set[str]:
        """The axes whose parts arguments are made whole of."""
        return {axis for a, r in zip(step.value.args, reach, strict=False) for axis, _ in self.reached(step, a, r)}

    def reduced(self, v: Value) -> Moves:
        """The reduction of a value, if it is partial sums."""
        if id(v.source) not in self.partial:
            return ()
        self.whole.add(id(v.source))
        axes = sorted(self.partial[id(v.source)][1])
        return tuple(Move(How.REDUCE, a, self.dim(v, a) if a in self.parts(v) or a == "etp" else None) for a in axes)

    def entered(self, step: Step, a: Value, reach: Reach, work: set[str], after: set[str]) -> Iterator[Move]:
        """From how an argument lies to how it is read, once it is no partial sum."""
        if isinstance(step.value.op, Route | Combine):
            return  # tokens that travel do not stay divided as they were
        parts, plain = self.parts(a), id(origin(a)) in self.plain
        reached = dict(self.reached(step, a, reach))
        for axis in ("tp", "etp", "cp"):
            if axis in reached:
                how = How.SPREAD if not reached[axis] else How.ENTER if axis in after else How.GATHER
                yield Move(how, axis, self.dim(a, axis))
            elif axis in parts:
                if axis == "tp" and self.scattered(a) and "tp" in step.axes.values():
                    yield Move(How.ENTER, axis, self.dim(a, axis))
            elif axis == "cp" and plain:
                if self.divides("cp") and "cp" not in work and id(step.value) not in self.plain:
                    yield Move(How.SHARE, "cp")
            elif axis in work and a.dtype is not DType.INDEX:
                yield Move(How.ENTER, axis, self.dim(a, axis) if axis == "etp" and not plain else None)
            elif axis in work and axis == "tp" and "tp" not in step.axes.values() and not reach and _sequence(a):
                yield Move(How.TAKE, axis, _sequence(a))  # all devices of tp have all tokens
        if reach.heads and "tp" in step.axes.values() and "tp" not in self.own(a).values():
            yield Move(How.NARROW, "tp", *reach.heads)

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
