"""One graph node that goes on position by position: its body on this rank's shards, with the states of its ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

from attrs import define, evolve, field, frozen
from torch import Tensor

from megaloom.dsl import Dim, Each, Node, Value, Weight
from megaloom.dsl.facts.placement import PlacedOp, Transitions
from megaloom.dsl.facts.primitives import origin
from megaloom.planner.contract.capability import AttentionKernel, Core, Execution
from megaloom.runtime.body.body_module import Body
from megaloom.runtime.body.evaluation import Evaluation, LocalProgram
from megaloom.runtime.megatron.build_context import BuildContext
from megaloom.runtime.ops import first_state, next_position
from megaloom.runtime.ops.registry import NextPosition, local_function
from megaloom.runtime.ops.tensors import dim_index

from .decoding_graph import DecodingGraph, incremental_values, mixes_positions
from .decoding_state import DecodingState, EncoderCache

Key = int | tuple[int, Transitions]
"""A value by its identity, and the transitions after which it is read, if there are any."""
Operation = Callable[[dict[Key, Tensor], DecodingState], None]
"""A function that computes one value of a node at the newest position from others, and adds it to them."""


@frozen(eq=False, slots=False)
class DecodingNode:
    """A node of this rank. Its body holds the rank's shard of each weight."""

    node: Node
    body: Body
    sequence: Dim  # of the written tokens
    incremental_inputs: frozenset[int]  # by identity of the value, as `incremental`
    incremental: frozenset[int]  # its primitives that depend on the written tokens

    @classmethod
    def of(cls, node: Node, context: BuildContext, execution: Execution, graph: DecodingGraph) -> DecodingNode:
        """Return a node whose weights have no values yet."""
        cores = tuple(_without_compilation(core) for core in execution.cores)
        body = Body(node, context, evolve(execution, cores=cores))
        reads = tuple(name in graph.incremental for name in node.inputs)
        inputs = frozenset(id(v) for v, depends in zip(body.program.inputs, reads, strict=True) if depends)
        return cls(node, body, graph.sequence, inputs, incremental_values(body.program, reads))

    @cached_property
    def weights(self) -> dict[int, Tensor]:
        """Return the weights as this rank computes with them, by the identity of their values."""
        return {i: self.body.full_weight(i).detach() for i in self.body.names}

    @cached_property
    def read_once(self) -> dict[Key, Value]:
        """Return what incremental primitives read of values that do not depend on the written tokens."""
        evaluation, found = Evaluation(self.body.local, {}, None), dict[Key, Value]()
        for p in self.body.local.placement.steps:
            for a, before in zip(p.step.value.args, p.reads, strict=True):
                read = id(p.step.value) in self.incremental and not isinstance(origin(a).op, Weight)
                if read and not self._depends(a):
                    transitions = evaluation.transitions_of(p, a, before)
                    found[(id(origin(a)), transitions) if transitions else id(a)] = a
        return found

    def _depends(self, v: Value) -> bool:
        """Return whether a value that a primitive reads depends on the written tokens."""
        while v.body is not None and id(v) not in self.incremental_inputs:
            v = v.body
        return id(v) in self.incremental_inputs | self.incremental

    def prefill(self, inputs: Mapping[str, Tensor], state: DecodingState) -> Tensor:
        """Return the output at all positions of a prompt, and add the states of the ops to that of the batch."""
        given = {id(v): inputs[name] for v, name in self._inputs}
        evaluation = _Prefill(self.body.local, {**self.weights, **given}, None, owner=self, state=state)
        out = evaluation.run()
        for key, v in self.read_once.items():
            x = evaluation.values.get(key) if isinstance(key, int) else evaluation.transitioned.get(key)
            if x is not None:
                state.caches[self.node.name, key] = _encoder_cache(v, x)
        return out

    def step(self, inputs: Mapping[str, Tensor], state: DecodingState) -> Tensor:
        """Return the output at the newest position, and update the states of the ops."""
        operations, output = self.operations
        values = dict(self.placed_weights)
        for v, name in self._inputs:
            if id(v) in self.incremental_inputs:
                values[id(v)] = inputs[name]
        for key in self.read_once:
            if isinstance(cache := state.caches.get((self.node.name, key)), EncoderCache):
                values[key] = cache.values
        for operation in operations:
            operation(values, state)
        return values[output]

    @cached_property
    def placed_weights(self) -> dict[Key, Tensor]:
        """Return the weights, and those that transitions move; `operations` adds these."""
        return dict(self.weights.items())

    @cached_property
    def operations(self) -> tuple[tuple[Operation, ...], Key]:
        """Return the operations of a step, in order, and the key of the output. They are found once for all steps."""
        return _Operations(self, Evaluation(self.body.local, {}, None)).found()

    @cached_property
    def _inputs(self) -> tuple[tuple[Value, str], ...]:
        """Return the inputs of the program, each with the name of the node that computes it."""
        return tuple(zip(self.body.program.inputs, self.node.inputs, strict=True))


@define(eq=False)
class _Prefill(Evaluation):
    """Evaluation of a node at all positions of prompts, which notes the states of its ops."""

    owner: DecodingNode = field(kw_only=True)
    state: DecodingState = field(kw_only=True)

    def computed(self, p: PlacedOp, *args: Tensor) -> Tensor:
        """Return the result of a primitive."""
        out, v = super().computed(p, *args), p.step.value
        keeps_state = id(v) in self.owner.incremental and v.op.decoding(v, self.owner.sequence.name).state
        if keeps_state and (state := first_state(v.op, v, args)) is not None:
            self.state.caches[self.owner.node.name, id(v)] = state
        return out


@define(eq=False)
class _Operations:
    """The operations of a node at the newest position, as they are found: primitives, transitions, copies of layers."""

    node: DecodingNode
    evaluation: Evaluation  # without values
    operations: list[Operation] = field(factory=list)
    made: set[Key] = field(factory=set)  # what is given, and what the operations compute

    def found(self) -> tuple[tuple[Operation, ...], Key]:
        """Return the operations, and the key of the output."""
        body, node = self.node.body.local, self.node
        self.made |= {*node.weights, *(id(v) for v in body.program.inputs), *node.read_once}
        for p in body.placement.steps:
            if id(p.step.value) in node.incremental and not p.step.outer:
                self.add(p)
        output = self.read(body.program.value, body.placement.output)
        return tuple(self.operations), output

    def add(self, p: PlacedOp) -> None:
        """Add a primitive, after what it reads, and the transitions of its result."""
        v, here = p.step.value, self.evaluation.rank_op(p)
        reads = ((a, self.evaluation.transitions_of(p, a, before)) for a, before in zip(v.args, p.reads, strict=True))
        args = [self.read(*reading) for reading in reads]
        if mixes_positions(v, self.node.sequence):
            step = next_position(v.op, here)
            self.operations.append(_from_state(id(v), step, args, (self.node.node.name, id(v))))
        else:
            self.operations.append(_computed(id(v), local_function(here), args))
        for t in self.needed(p.result):
            self.operations.append(_computed(id(v), partial(self.evaluation.performed, t, v), [id(v)]))
        self.made.add(id(v))

    def read(self, v: Value, transitions: Transitions) -> Key:
        """Return the key of a value after transitions, and add what computes it."""
        key = id(origin(v)), transitions
        if key not in self.made:
            transitions = self.needed(transitions)
            key = id(origin(v)), transitions
        if not transitions:
            return self.value(v)
        if key not in self.made:
            self.made.add(key)
            before = self.read(v, transitions[:-1])
            move = partial(self.evaluation.performed, transitions[-1], v)
            if isinstance(origin(v).op, Weight):
                self.node.placed_weights[key] = move(self.node.placed_weights[before]).contiguous()
            else:
                self.operations.append(_computed(key, lambda x: move(x).contiguous(), [before]))
        return key

    def value(self, v: Value) -> Key:
        """Return the key of a value in the placement in which its primitive leaves it."""
        while id(v) not in self.made and v.body is not None and not isinstance(v.op, Each):
            v = v.body
        if id(v) not in self.made:
            assert isinstance(v.op, Each), f"{v} is read before it is computed"
            self.operations.append(_stacked(v, self.node.body.local))
            self.made.add(id(v))
        return id(v)

    def needed(self, transitions: Transitions) -> Transitions:
        """Return the transitions over axes of more than one rank."""
        return tuple(t for t in transitions if self.node.body.groups.of_axis(t.axis).size() > 1)


def _computed(key: Key, function: Callable[..., Tensor], args: Sequence[Key]) -> Operation:
    """Return the operation of a function of other values."""

    def run(values: dict[Key, Tensor], state: DecodingState) -> None:
        values[key] = function(*map(values.__getitem__, args))

    return run


def _from_state(key: Key, step: NextPosition, args: Sequence[Key], cache: tuple[str, int]) -> Operation:
    """Return the operation of an op that mixes positions."""

    def run(values: dict[Key, Tensor], state: DecodingState) -> None:
        values[key] = step(state.rows, state.caches.get(cache), tuple(map(values.__getitem__, args)))

    return run


def _stacked(v: Value, local: LocalProgram) -> Operation:
    """Return the operation of the copies of a layer, such as experts."""

    def run(values: dict[Key, Tensor], state: DecodingState) -> None:
        known = {key: x for key, x in values.items() if isinstance(key, int)}
        moved = {key: x for key, x in values.items() if not isinstance(key, int)}
        values[id(v)] = Evaluation(local, known, None, transitioned=moved).value(v)

    return run


def _encoder_cache(v: Value, x: Tensor) -> EncoderCache:
    """Return a tensor that no written token changes, with its dims of rows and of an encoder's positions."""
    rows = dim_index(v.shape, "batch") if "batch" in v.shape else None
    other = [i for i, d in enumerate(v.shape) if d.size is None and d.name != "batch"]
    return EncoderCache(x, rows, other[0] if other else None)


def _without_compilation(core: Core) -> Core:
    """Return a core whose kernel is not compiled for each length of a prompt."""
    return Core(core.value, AttentionKernel.BLOCKS) if core.kernel is AttentionKernel.FLEX else core
