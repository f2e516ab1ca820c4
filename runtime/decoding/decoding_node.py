"""One graph node that goes on position by position: its body on this rank's shards, with what its ops keep."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from attrs import define, evolve, field, frozen
from torch import Tensor

from megaloom.dsl import Node, Value, Weight
from megaloom.dsl.facts.placement import PlacedOp, Transitions
from megaloom.dsl.facts.primitives import origin
from megaloom.planner.contract.capability import AttentionKernel, Core, Execution
from megaloom.runtime.body.body_module import Body
from megaloom.runtime.body.evaluation import Evaluation
from megaloom.runtime.megatron.build_context import BuildContext
from megaloom.runtime.reference.tensors import dim_index

from .decoding_graph import incremental_values
from .kept import Once, Rows
from .rules import RULES, Call

Reading = tuple[Value, Transitions]
"""A value, and the transitions after which a primitive reads it."""


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
        evaluation = _Beginning(self.body.local, self._values(inputs), None, owner=self, rows=rows)
        out = evaluation.run()
        for i, (v, transitions) in enumerate(self.read_once):
            moved = evaluation.transitioned.get((id(origin(v)), transitions))
            x = moved if transitions else evaluation.values.get(id(v))
            if x is not None:
                rows.kept[self.node.name, i] = _once(v, x)
        return out

    def step(self, inputs: Mapping[str, Tensor], rows: Rows) -> Tensor:
        """Return the output at the newest position, and update in `rows` what the ops keep."""
        evaluation = _Step(self.body.local, self._values(inputs), None, owner=self, rows=rows)
        for i, (v, transitions) in enumerate(self.read_once):
            kept = rows.kept.get((self.node.name, i))
            if isinstance(kept, Once) and transitions:
                evaluation.transitioned[id(origin(v)), transitions] = kept.values
            elif isinstance(kept, Once):
                evaluation.values[id(v)] = kept.values
        return evaluation.run()

    def _values(self, inputs: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Return weights and the inputs that are given, by the identity of their values."""
        given = zip(self.body.program.inputs, self.node.inputs, strict=True)
        return {**self.weights, **{id(v): inputs[name] for v, name in given if name in inputs}}


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
class _Step(Evaluation):
    """Evaluation of a node at the newest position of each row, from what its ops have kept."""

    owner: DecodingNode = field(kw_only=True)
    rows: Rows = field(kw_only=True)

    def run(self) -> Tensor:
        """Return the output of the node. Only primitives that depend on the written tokens run."""
        for p in self.local.placement.steps:
            if id(p.step.value) in self.owner.incremental and not p.step.outer:
                self.value(p.step.value)
        return self.read(self.local.program.value, self.local.placement.output)

    def computed(self, p: PlacedOp, *args: Tensor) -> Tensor:
        """Return the result of a primitive: by its rule, if it mixes positions."""
        v, key = p.step.value, (self.owner.node.name, id(p.step.value))
        rule = RULES.get(type(v.op)) if id(v) in self.owner.incremental else None
        if rule is None:
            return super().computed(p, *args)
        out, kept = rule.advance(Call(p, self.local.groups, self.rows), args, self.rows.kept.get(key))
        if kept is not None:
            self.rows.kept[key] = kept
        return out


def _once(v: Value, x: Tensor) -> Once:
    """Return a tensor that is computed once, with its dims of rows and of an encoder's positions."""
    rows = dim_index(v.shape, "batch") if "batch" in v.shape else None
    other = [i for i, d in enumerate(v.shape) if d.size is None and d.name != "batch"]
    return Once(x, rows, other[0] if other else None)


def _without_compilation(core: Core) -> Core:
    """Return a core whose kernel is not compiled for each length of a prompt."""
    return Core(core.value, AttentionKernel.BLOCKS) if core.kernel is AttentionKernel.FLEX else core
