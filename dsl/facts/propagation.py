"""Sharding propagation: the placement of every value of a node, and the transitions between placements.

`propagate(program, split)` returns, for each argument of each primitive, the transitions from its placement to the one
in which it is read. `collectives` counts them; the runtime performs them when it runs the body of a layer.

Over an axis a value is Shard(dim) if one of its dims lies on the axis, else Invariant; weights are Replicate over cp.
With sequence parallelism a value with a sequence and no dim on tp is Shard(seq) over tp. Work is sharded over an axis
if a tensor that it touches is; an Invariant value becomes Replicate before such work. A contraction over a sharded dim
gives a Partial value. It stays Partial when it is added to other Partial values, and is reduced before another op
reads it or it leaves the node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache

from attrs import define, evolve, field, frozen

from megaloom.dsl.combine import Each
from megaloom.dsl.dims import Dim, DType
from megaloom.dsl.op import PLAIN, Reads
from megaloom.dsl.ops.loss import is_loss
from megaloom.dsl.ops.weight import Input, Weight
from megaloom.dsl.sharding_table import SEQUENCES, Split
from megaloom.dsl.value import Pointwise, Value

from .placement import INVARIANT, PARTIAL, REPLICATE, NodePlacement, PlacedOp, Placement, Shard, Transition, Transitions
from .primitives import Program, Step, effective_split, origin


def propagate(program: Program, split: Split) -> NodePlacement:
    """Return the transitions with which devices under a split compute a node.

    They depend on which axes have several devices, not on how many, but for norms over groups of channels.
    """
    split = effective_split(program, split)
    if not _has_grouped_norms(program):
        tp, cp, etp = (min(2, degree) for degree in (split.tp, split.cp, split.etp))
        split = Split(tp=tp, cp=cp, etp=etp, sequence_parallel=split.sequence_parallel)
    return _placement(program, split)


@lru_cache(maxsize=1 << 12)
def _has_grouped_norms(program: Program) -> bool:
    return any(reads.groups for step in program.steps for reads in step.reads)


@lru_cache(maxsize=1 << 13)
def _placement(program: Program, split: Split) -> NodePlacement:
    inference = _Inference(program, split)
    steps = tuple(inference.read())
    output = inference.reductions(program.value)
    return NodePlacement(
        steps, output, {i: step for i, (step, _) in inference.partial.items()}, frozenset(inference.weights_only)
    )


AXES = ("cp", "tp", "etp")  # of devices that share the work of a primitive


@frozen(eq=False)
class _Argument:
    """An argument of a primitive, and the axes over which it is gathered because more is read than the local shard.

    gathers: True if the primitive reads the other shards, False if it only needs to know where its own begins.
    """

    value: Value
    reads: Reads
    gathers: Mapping[str, bool]


@define
class _Inference:
    program: Program
    split: Split
    partial: dict[int, tuple[Step, frozenset[str]]] = field(factory=dict)  # by the identity of the source
    reduced: set[int] = field(factory=set)  # Partial values that something has reduced
    weights_only: set[int] = field(factory=set)
    dims_cache: dict[int, dict[str, str]] = field(factory=dict)  # of `sharded_dims`
    axes_cache: dict[int, set[str]] = field(factory=dict)  # of `sharded_axes`
    placements: dict[tuple[int, str], Placement] = field(factory=dict)  # of `placement`

    def read(self) -> Iterator[PlacedOp]:
        for step in self.program.steps:
            v = step.value
            if isinstance(v.op, Weight):
                self.weights_only.add(id(v))
            if isinstance(v.op, Weight | Input):
                continue
            if v.args and all(id(origin(a)) in self.weights_only for a in v.args):
                self.weights_only.add(id(v))
            unreduced = [self.unreduced(a) for a in v.args]
            if v.op == Pointwise("add") and unreduced[0] and all(p and p[1] == unreduced[0][1] for p in unreduced):
                self.partial[id(v)] = unreduced[0]
                yield PlacedOp(step, tuple(() for _ in v.args), (), frozenset(self.sharded_axes(v)))
                continue
            yield self.place(step)
            axes = self.over(step, _summed(step))
            if is_loss(v):
                axes -= {"cp"}  # added to those of dp ranks and micro-batches, at the end of the step
            if axes:
                self.partial[id(v)] = step, axes

    def unreduced(self, v: Value) -> tuple[Step, frozenset[str]] | None:
        """Return the contraction and the axes of a Partial value; None if it was reduced or is not Partial."""
        return None if id(v.source) in self.reduced else self.partial.get(id(v.source))

    def place(self, step: Step) -> PlacedOp:
        """Return a primitive with its transitions."""
        v = step.value
        pairs = [(a, self.layout_reads(step, a, reads)) for a, reads in zip(v.args, step.reads, strict=True)]
        arguments = self.aligned([_Argument(a, r, dict(self.required_gathers(step, a, r))) for a, r in pairs])
        after, partial = self.sharded_axes(v), self.over(step, _summed(step))
        work = {axis for x in (v, *v.args) if id(origin(x)) not in self.weights_only for axis in self.sharded_axes(x)}
        work |= {axis for axis in step.axes.values() if self.is_sharded(axis)}
        divided = after | self.divided_slots(step)
        work -= _gathered_axes(arguments) - divided - partial
        reads = tuple(
            (*self.reductions(a.value), *self.argument_transitions(step, a, work, divided | partial)) for a in arguments
        )
        oversized = (divided & self.oversized_axes(step, arguments)) - partial
        slices = tuple(Transition(a, REPLICATE, self.placement(v, a)) for a in AXES if a in oversized)
        return PlacedOp(step, reads, slices, frozenset(after), tuple(sorted(self.over(step, _statistics(step)))))

    def layout_reads(self, step: Step, a: Value, reads: Reads) -> Reads:
        """Return what a primitive reads of an argument under this split.

        A dim is read whole under another name if the two names lie on different axes. Groups of indices are not read
        whole where each device has whole groups: only the first dim is sharded, into a divisor of their number.
        """
        if reads.renamed:
            old, new = reads.renamed
            moves = step.table.axis(a.shape[old]) != step.table.axis(step.value.shape[new])
            return evolve(reads, whole=reads.whole | {old}) if moves else reads
        if reads.groups:
            count, names = reads.groups
            first, *others = (self.split.degree(step.axes.get(name, "")) for name in names)
            own = count % first == 0 and max(others, default=1) == 1 and not SEQUENCES.intersection(names)
            return PLAIN if own else reads
        return reads

    def aligned(self, arguments: list[_Argument]) -> list[_Argument]:
        """Return the arguments, each with as many indices as the others.

        If one is gathered along a dim, the op computes the whole dim. An argument that it reads at the index of the
        result alone then needs no gather: it has zeros outside of the device's shard.
        """
        gathered = [(a.value, axis) for a in arguments if not a.reads.keys for axis in a.gathers]
        computed = {(axis, self.sharded_dim(v, axis)) for v, axis in gathered}
        return [evolve(a, gathers={**dict(self.widened(a, computed)), **a.gathers}) for a in arguments]

    def widened(self, a: _Argument, computed: Collection[tuple[str, str | None]]) -> Iterator[tuple[str, bool]]:
        """Yield the axes over which an argument needs the whole of a dim that the op computes whole."""
        for axis, name in computed:
            if axis in self.sharded_axes(a.value):
                if self.sharded_dim(a.value, axis) == name:
                    yield axis, False
            elif self.is_sliced(a, axis) and _sequence(a.value) == name:
                yield axis, True

    def oversized_axes(self, step: Step, arguments: list[_Argument]) -> set[str]:
        """Return the axes over which each device computes more of a result than its shard."""
        if step.value.op.work_kind.is_exchange:
            return set()
        return {axis for axis in AXES if not any(self.is_read_sharded(step, a, axis) for a in arguments)}

    def is_read_sharded(self, step: Step, a: _Argument, axis: str) -> bool:
        """Return whether a primitive reads the shard of an argument that its shard of the result is computed from."""
        dim = self.sharded_dim(step.value, axis)
        old, new = a.reads.renamed or (None, None)
        if axis in a.gathers:
            return False
        if axis in self.sharded_axes(a.value):
            same = self.sharded_dim(a.value, axis) == (old if dim == new else dim)
            return same and not (axis == "tp" and self.enters_tensor_parallel(step, a.value))
        return "tp" not in step.axes.values() and self.is_sliced(a, axis) and _sequence(a.value) == dim

    def is_sliced(self, a: _Argument, axis: str) -> bool:
        """Return whether work on a shard of the sequence over tp reads its positions of whole ids."""
        return axis == "tp" and self.split.sequence_parallel and _is_data(a.value) and not a.reads

    def reductions(self, v: Value) -> Transitions:
        """Return the reductions of a value; none if it is not Partial."""
        if id(v.source) not in self.partial:
            return ()
        self.reduced.add(id(v.source))
        axes = sorted(self.partial[id(v.source)][1])
        return tuple(Transition(axis, PARTIAL, self.placement(v, axis)) for axis in axes)

    def argument_transitions(self, step: Step, a: _Argument, work: set[str], after: set[str]) -> Iterator[Transition]:
        """Yield the transitions of an argument from its placement, after reductions, to the one in which it is read."""
        if step.value.op.work_kind.is_exchange:
            return  # the all-to-all of tokens changes their placement itself
        for axis in filter(self.is_sharded, ("tp", "etp", "cp")):
            source, target = self.placement(a.value, axis), self.read_placement(step, a, axis, work, after)
            if target != source:
                yield Transition(axis, source, target)
        shared = a.reads.heads
        if shared and "tp" in step.axes.values() and "tp" not in self.sharded_dims(a.value).values():
            dim, heads = shared
            yield Transition("tp", REPLICATE, Shard(dim, heads=heads))

    def placement(self, v: Value, axis: str) -> Placement:
        """Return the placement of a value over an axis, after reductions.

        Weights are Replicate over cp: the reduction at the end of a step adds their gradients of all cp ranks. Devices
        of etp have dispatched tokens of their own.
        """
        key = id(v), axis
        if key not in self.placements:
            weights_only = id(origin(v)) in self.weights_only
            shards = axis in self.sharded_axes(v) or (axis == "etp" and not weights_only)
            dim = self.sharded_dim(v, axis) if shards else None
            whole = REPLICATE if axis == "cp" and weights_only else INVARIANT
            self.placements[key] = Shard.over(axis, dim) if dim else whole
        return self.placements[key]

    def read_placement(self, step: Step, argument: _Argument, axis: str, work: set[str], after: set[str]) -> Placement:
        """Return the placement over an axis in which a primitive reads an argument: that of the first row that holds.

        work: the axes over which devices do different work. after: those over which the result is sharded.
        """
        a, gathers = argument.value, argument.gathers
        source, sequence = self.placement(a, axis), _sequence(a)
        repeats = axis not in work and id(step.value) not in self.weights_only
        of_sequence = axis == "tp" and "tp" not in step.axes.values() and not argument.reads
        rows: tuple[tuple[object, Placement], ...] = (
            (gathers.get(axis) is False, PARTIAL),
            (axis in gathers, REPLICATE if axis in after else INVARIANT),
            (axis == "tp" and self.enters_tensor_parallel(step, a), REPLICATE),
            (axis in self.sharded_axes(a), source),
            (source == REPLICATE and repeats, INVARIANT),  # a weight
            (axis not in work, source),
            (not _is_data(a), REPLICATE),
            (of_sequence and sequence, Shard(sequence or "")),  # ids of the positions that this device computes
        )
        return next((target for holds, target in rows if holds), source)

    def enters_tensor_parallel(self, step: Step, a: Value) -> bool:
        """Return whether work on shards of another dim over tp reads a value that is Shard(seq)."""
        return "tp" in step.axes.values() and "tp" in self.sharded_axes(a) and self.is_sequence_parallel(a)

    def required_gathers(self, step: Step, a: Value, reads: Reads) -> Iterator[tuple[str, bool]]:
        """Yield the axes over which an argument is gathered, because the primitive reads more than the local shard.

        The second item is True if the primitive reads the other shards, False if it only needs their offset.
        """
        for axis in self.sharded_axes(a):
            if axis == "tp" and self.enters_tensor_parallel(step, a):
                continue
            name = self.sharded_dim(a, axis)
            if name in self.unshared_dims(step, axis):
                yield axis, True
                continue
            if axis == "cp" and reads.located and name not in reads.whole:
                continue  # attention knows the positions of a rank's queries
            if name in reads.whole | reads.offset:
                yield axis, name in reads.whole

    def divided_slots(self, step: Step) -> set[str]:
        """Return etp if its devices compute a primitive of experts for all their slots, and each keeps its own."""
        all_slots = "etp" in step.axes.values() and id(step.value) not in self.weights_only and self.is_sharded("etp")
        return {"etp"} if all_slots and _sequence(step.value) is not None else set()

    def unshared_dims(self, step: Step, axis: str) -> frozenset[str]:
        """Return the dims on an axis that some tensors of a primitive have whole, because another dim of them is on it.

        An axis shards one dim of a tensor. If the product of [.. ff heads] and [heads ..] has ff sharded, heads are
        gathered.
        """
        own = [self.sharded_dims(v) for v in (*step.value.args, step.value)]
        on = {name for dims in own for name, a in dims.items() if a == axis}
        if len(on) < 2:
            return frozenset()
        shapes = [v.shape.names for v in (*step.value.args, step.value)]
        return frozenset(n for n in on if any(n in s and n not in dims for s, dims in zip(shapes, own, strict=True)))

    def is_sharded(self, axis: str) -> bool:
        """Return whether tensors are sharded over an axis."""
        return axis not in ("dp", "ep") and self.split.degree(axis) > 1

    def sharded_dims(self, v: Value) -> dict[str, str]:
        """Return the sharded dims of a value with their axes."""
        if id(v) not in self.dims_cache:
            axes = _shardable_dims(self.program).get(id(v)) or self.program.table.axes((), v.shape)
            self.dims_cache[id(v)] = {name: axis for name, axis in axes.items() if self.is_sharded(axis)}
        return self.dims_cache[id(v)]

    def sharded_axes(self, v: Value) -> set[str]:
        """Return the axes over which a value is sharded, including its sequence."""
        if id(v) not in self.axes_cache:
            axes = set(self.sharded_dims(v).values())
            if _sequence(v) is not None:
                axes |= {"cp"} if self.is_sharded("cp") else set()
                axes |= {"tp"} if self.is_sharded("tp") and self.is_sequence_parallel(v) else set()
            self.axes_cache[id(v)] = axes
        return self.axes_cache[id(v)]

    def is_sequence_parallel(self, v: Value) -> bool:
        """Return whether a value is Shard(seq) over tp."""
        return (
            self.split.sequence_parallel
            and not _is_data(v)
            and "tp" not in self.sharded_dims(v).values()
            and _sequence(v) is not None
        )

    def sharded_dim(self, v: Value, axis: str) -> str | None:
        """Return the dim of a value that is sharded over an axis."""
        return next((name for name, a in self.sharded_dims(v).items() if a == axis), None) or _sequence(v)

    def over(self, step: Step, names: Collection[str]) -> frozenset[str]:
        """Return the axes over which a sum along these dims is Partial."""
        axes = {step.axes[name] for name in names if name in step.axes}
        axes -= {axis for axis in axes if self.unshared_dims(step, axis).issuperset(_on_axis(step, axis, names))}
        if (
            SEQUENCES.intersection(names)
            and "tp" not in step.axes.values()
            and any(map(self.is_sequence_parallel, step.value.args))
        ):
            axes.add("tp")
        return frozenset(filter(self.is_sharded, axes))


def _on_axis(step: Step, axis: str, names: Collection[str]) -> set[str]:
    """Return those dims of a primitive that lie on an axis."""
    return {name for name in names if step.axes.get(name) == axis}


def _gathered_axes(arguments: Iterable[_Argument]) -> set[str]:
    """Return the axes over which arguments are gathered."""
    return {axis for a in arguments for axis in a.gathers}


@lru_cache(maxsize=1 << 12)
def _shardable_dims(program: Program) -> dict[int, dict[str, str]]:
    """Return the dims of each value of a program that a split can shard, with their axes; by identity."""
    outers = {id(s.value): s.outer for s in program.steps}

    def outer_dims(v: Value) -> tuple[Dim, ...]:
        o = origin(v)
        return outers.get(id(o.source), ())[:-1] if isinstance(o.op, Each) else outers.get(id(o), ())

    return {id(v): program.table.axes(outer_dims(v), v.shape) for s in program.steps for v in (s.value, *s.value.args)}


def _sequence(v: Value) -> str | None:
    """Return the sequence dim of a value, or the dim of the slots for its tokens; None if it has neither."""
    return next((d.name for d in v.shape if d.name in SEQUENCES or any(o.name in SEQUENCES for o in d.of)), None)


def _summed(step: Step) -> tuple[str, ...]:
    """Return the dims that a primitive sums over: the results of its devices are terms of a sum."""
    return tuple(name for reads in step.reads for name in reads.summed)


def _statistics(step: Step) -> tuple[str, ...]:
    """Return the dims over which a primitive reduces by itself: its devices exchange statistics, not the result."""
    return tuple(name for reads in step.reads for name in reads.statistics)


def _is_data(v: Value) -> bool:
    """Return whether a value is ids, or a mask or weights that the data gives: every device of tp has all of it."""
    return v.dtype is DType.INDEX or (isinstance(v.source.op, Input) and v.dtype is not DType.COMPUTE)
