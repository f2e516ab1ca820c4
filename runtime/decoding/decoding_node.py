"""One graph node that goes on position by position: its body on this rank's shards, with what its ops keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from attrs import define, evolve, field, frozen
from torch import Tensor

from megaloom.dsl import Each, Node, Value, Weight
from megaloom.dsl.facts.placement import PlacedOp, Transition, Transitions
from megaloom.dsl.facts.primitives import origin
from megaloom.planner.contract.capability import AttentionKernel, Core, Execution
from megaloom.runtime.body.body_module import Body
from megaloom.runtime.body.evaluation import Evaluation, LocalProgram
from megaloom.runtime.body.transitions import perform
from megaloom.runtime.megatron.build_context import BuildContext
from megaloom.runtime.reference.tensors import dim_index

from .decoding_graph import incremental_values
from .kept import Once, Rows
from .rules import RULES, RuleStep

Reading = tuple[Value, Transitions]
"""A value, and the transitions after which a primitive reads it."""
Key = int | tuple[int, Transitions]
"""A value by its identity, and the transitions after which it is read, if there are any."""
Operation = Callable[[dict[Key, Tensor], Rows], None]
"""A function that computes one value of a node at the newest position from others, and adds it to them."""


@frozen(eq=False, slots=False)
class DecodingNode:
    """A node of this rank. Its body holds the rank's shard of each weight."""

    node: Node
    body: Body
    incremental_inputs: frozenset[int]  # by identity of the value, as `incremental`
    incremental: frozenset[int]  # its primitives that depend on the written tokens

    @classmethod
    def of(cls, node: Node, context: BuildContext, execution: Execution, incremental: frozenset[str]) -> DecodingNode:
        """Return a node whose weights have no values yet.

        incremental: the names of nodes and inputs that depend on the written tokens.
        """
        cores = tuple(_without_compilation(core) for core in execution.cores)
        body = Body(node, context, evolve(execution, cores=cores))
        reads = tuple(name in incremental for name in node.inputs)
        inputs = frozenset(id(v) for v, depends in zip(body.program.inputs, reads, strict=True) if depends)
        return cls(node, body, inputs, incremental_values(body.program, reads))

    @cached_property
    def weights(self) -> dict[int, Tensor]:
        """Return the weights as this rank computes with them, by the identity of their values."""
        return {i: self.body.full_weight(i).detach() for i in self.body.names}

    @cached_property
    def read_once(self) -> tuple[Reading, ...]:
        """Return what incremental primitives read of values that do not depend on the written tokens."""
        evaluation, found = Evaluation(self.body.local, {}, None), {}
        for p in self.body.local.placement.steps:
            for a, before in zip(p.step.value.args, p.reads, strict=True):
                read = id(p.step.value) in self.incremental and not isinstance(origin(a).op, Weight)
                if read and not self._depends(a):
                    transitions = evaluation.transitions_of(p, a, before)
                    found[id(origin(a)) if transitions else id(a), transitions] = a, transitions
        return tuple(found.values())

    def _depends(self, v: Value) -> bool:
        """Return whether a value that a primitive reads depends on the written tokens."""
        while v.body is not None and id(v) not in self.incremental_inputs:
            v = v.body
        return id(v) in self.incremental_inputs | self.incremental

    def begin(self, inputs: Mapping[str, Tensor], rows: Rows) -> Tensor:
        """Return the output at all positions of a prompt, and add to `rows` what the ops keep."""
        given = {id(v): inputs[name] for v, name in self._inputs}
        evaluation = _Beginning(self.body.local, {**self.weights, **given}, None, owner=self, rows=rows)
        out = evaluation.run()
        for i, (v, transitions) in enumerate(self.read_once):
            moved = evaluation.transitioned.get((id(origin(v)), transitions))
            x = moved if transitions else evaluation.values.get(id(v))
            if x is not None:
                rows.kept[self.node.name, i] = _once(v, x)
        return out

    def step(self, inputs: Mapping[str, Tensor], rows: Rows) -> Tensor:
        """Return the output at the newest position, and update in `rows` what the ops keep."""
        operations, output = self.operations
        values = dict(self.placed_weights)
        for v, name in self._inputs:
            if id(v) in self.incremental_inputs:
                values[id(v)] = inputs[name]
        for i, (v, transitions) in enumerate(self.read_once):
            kept = rows.kept.get((self.node.name, i))
            if isinstance(kept, Once):
                values[(id(origin(v)), transitions) if transitions else id(v)] = kept.values
        for operation in operations:
            operation(values, rows)
        return values[output]

    @cached_property
    def placed_weights(self) -> dict[Key, Tensor]:
        """Return the weights, and those that transitions move; `operations` adds these."""
        return dict(self.weights.items())

    @cached_property
    def operations(self) -> tuple[tuple[Operation, ...], Key]:
        """Return the operations of a step, in order, and the key of the output. They are found once for all steps."""
        return _Operations(self).found()

    @cached_property
    def _inputs(self) -> tuple[tuple[Value, str], ...]:
        """Return the inputs of the program, each with the name of the node that computes it."""
        return tuple(zip(self.body.program.inputs, self.node.inputs, strict=True))


@define(eq=False)
class _Beginning(Evaluation):
    """Evaluation of a node at all positions of prompts, which notes what ops keep."""

    owner: DecodingNode = field(kw_only=True)
    rows: Rows = field(kw_only=True)

    def computed(self, p: PlacedOp, *args: Tensor) -> Tensor:
        """Return the result of a primitive."""
        out, v = super().computed(p, *args), p.step.value
        rule = RULES.get(type(v.op)) if id(v) in self.owner.incremental else None
        if rule and (kept := rule.begin(v, args)) is not None:
            self.rows.kept[self.owner.node.name, id(v)] = kept
        return out


@define(eq=False)
class _Operations:
    """The operations of a node at the newest position, as they are found: primitives, transitions, copies of layers."""

    node: DecodingNode
    operations: list[Operation] = field(factory=list)
    made: set[Key] = field(factory=set)  # what is given, and what the operations compute

    def found(self) -> tuple[tuple[Operation, ...], Key]:
        """Return the operations, and the key of the output."""
        local, node = self.node.body.local, self.node
        once = {(id(origin(v)), transitions) if transitions else id(v) for v, transitions in node.read_once}
        self.made |= {*node.weights, *(id(v) for v in local.program.inputs), *once}
        for p in local.placement.steps:
            if id(p.step.value) in node.incremental and not p.step.outer:
                self.add(p)
        output = self.read(local.program.value, local.placement.output)
        return tuple(self.operations), output

    def add(self, p: PlacedOp) -> None:
        """Add a primitive, after what it reads, and the transitions of its result."""
        v, groups = p.step.value, self.node.body.groups
        evaluation = Evaluation(self.node.body.local, {}, None)
        args = [
            self.read(a, evaluation.transitions_of(p, a, before)) for a, before in zip(v.args, p.reads, strict=True)
        ]
        if rule := RULES.get(type(v.op)):
            self.operations.append(_by_rule(id(v), rule.advance(p, groups), args, (self.node.node.name, id(v))))
        else:
            self.operations.append(_computed(id(v), evaluation.function(p), args))
        for t in self.needed(p.result):
            self.operations.append(_computed(id(v), self.moving(v, t), [id(v)]))
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
            move = self.moving(v, transitions[-1])
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

    def moving(self, v: Value, t: Transition) -> Callable[[Tensor], Tensor]:
        """Return a transition as a function."""
        dim = dim_index(v.shape, t.shard.dim) if t.shard else None
        return lambda x: perform(t, x, dim, self.node.body.groups)


def _computed(key: Key, function: Callable[..., Tensor], args: Sequence[Key]) -> Operation:
    """Return the operation of a function of other values."""

    def run(values: dict[Key, Tensor], rows: Rows) -> None:
        values[key] = function(*map(values.__getitem__, args))

    return run


def _by_rule(key: Key, step: RuleStep, args: Sequence[Key], kept: tuple[str, int]) -> Operation:
    """Return the operation of an op that mixes positions."""

    def run(values: dict[Key, Tensor], rows: Rows) -> None:
        values[key] = step(rows, rows.kept.get(kept), tuple(map(values.__getitem__, args)))

    return run


def _stacked(v: Value, local: LocalProgram) -> Operation:
    """Return the operation of the copies of a layer, such as experts."""

    def run(values: dict[Key, Tensor], rows: Rows) -> None:
        known = {key: x for key, x in values.items() if isinstance(key, int)}
        moved = {key: x for key, x in values.items() if not isinstance(key, int)}
        values[id(v)] = Evaluation(local, known, None, transitioned=moved).value(v)

    return run


def _once(v: Value, x: Tensor) -> Once:
    """Return a tensor that is computed once, with its dims of rows and of an encoder's positions."""
    rows = dim_index(v.shape, "batch") if "batch" in v.shape else None
    other = [i for i, d in enumerate(v.shape) if d.size is None and d.name != "batch"]
    return Once(x, rows, other[0] if other else None)


def _without_compilation(core: Core) -> Core:
    """Return a core whose kernel is not compiled for each length of a prompt."""
    return Core(core.value, AttentionKernel.BLOCKS) if core.kernel is AttentionKernel.FLEX else core
