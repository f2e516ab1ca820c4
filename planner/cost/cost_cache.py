"""Cache of node costs: a node kind is priced once for all layouts under which it costs the same.

`CostCache.bare_table(layout)` gives the costs of all kinds, equal to those of `cost_table`. Most kinds see only some
axes of a layout, and of a micro-batch only its number of tokens. The facts of a node are affine in that number, so that
two evaluations give all others; a sharding that only `large_batch_seconds` asks for takes one.
"""

from __future__ import annotations

from math import gcd, lcm
from operator import attrgetter
from typing import Any

import numpy as np
from attrs import define, evolve, field, fields, frozen

from megaloom.dsl.dims import Sizes
from megaloom.dsl.facts.costs import Costs, costs
from megaloom.dsl.facts.primitives import Program, Step, program
from megaloom.dsl.node import Node
from megaloom.dsl.ops.shape import Select
from megaloom.dsl.ops.weight import Weight
from megaloom.dsl.sharding_table import SEQUENCES, Split
from megaloom.planner.contract.capability import Execution
from megaloom.planner.contract.choices import GradReduce, Overlap, OverlapSet
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import (
    Column,
    Layouts,
    Rows,
    alike,
)
from megaloom.planner.contract.workload import Workload
from megaloom.planner.model.structure import ModelStructure

from .cost_table import (
    BareTable,
    NodeCost,
    bare_table,
    node_cost,
    wait_for_host,
)
from .job import Job
from .profiles.groups import FrameworkProfile

# Fields of a layout on which node costs depend, without recompute.
NODE_COST_FIELDS = (
    *("tp", "cp", "ep", "etp", "sequence_parallel", "micro_batch", "microbatch_overlap_bits"),
    *("vocab_multiple", "grad_reduce"),
)
# Fields of `NodeCost` that a search asks for. No profile of a plan saves results under full recompute.
SEARCHED_COSTS = ("row", "by_part", "saved_under_full", "workspace")
NODE_COSTS_OF = attrgetter(*NODE_COST_FIELDS)
# Ops that may treat each token by itself.
COUNTED = ("work", "collectives", "saved", "inputs")  # the fields of `Costs` that depend on the tokens


@frozen
class Sensitivity:
    """The parts of a layout that the cost of a node kind depends on."""

    experts: bool  # the axes of experts
    tokenwise: bool  # only the number of tokens on a device, not the number of sequences
    share: int  # a number of tokens of which every expert gets a whole number


Simplest = tuple[Layout, int, Split]  # a layout, its sequence length, and its split
# A fact, its fields that do not depend on the tokens, and for each other field its value and its slope.
AffineFact = tuple[Any, dict[str, Any], dict[str, tuple[int, int]]]


@frozen(eq=False)
class AffineFacts:
    """The facts of a node as affine functions of its tokens."""

    tokens: int  # of the first evaluation; the second one had twice as many
    first: Costs
    facts: tuple[tuple[str, tuple[AffineFact, ...]], ...]

    @classmethod
    def of(cls, one: Costs, two: Costs, tokens: int) -> AffineFacts:
        """Return the affine facts that these two evaluations determine."""
        pairs = ((name, zip(getattr(one, name), getattr(two, name), strict=True)) for name in COUNTED)
        return cls(tokens, one, tuple((name, tuple(_affine(a, b) for a, b in each)) for name, each in pairs))

    def at(self, tokens: int) -> Costs:
        """Return the facts for this number of tokens, rounded up to whole numbers as the facts are."""
        more, first = tokens - self.tokens, self.tokens
        lists: dict[str, Any] = {
            name: tuple(
                type(a)(**fixed, **{k: -(-(x * first + d * more) // first) for k, (x, d) in slopes.items()})
                if slopes
                else a
                for a, fixed, slopes in each
            )
            for name, each in self.facts
        }
        return evolve(self.first, **lists)


def _affine(a: Any, b: Any) -> AffineFact:
    values = {f.name: getattr(a, f.name) for f in fields(type(a))}
    slopes = {
        k: (x, getattr(b, k) - x) for k, x in values.items() if type(x) is int and k != "port" and getattr(b, k) != x
    }
    return a, {k: x for k, x in values.items() if k not in slopes}, slopes


@frozen
class Evaluation:
    """A number of tokens for which the facts of a node are evaluated."""

    execution: Execution
    batch: int
    seq: int

    def costs(self, node: Node, split: Split) -> Costs:
        """Return the facts."""
        separate = not self.execution.module
        return costs(node, batch=self.batch, seq=self.seq, split=split, losses=False, separate=separate)


@define(eq=False)
class CostCache:
    """Costs of the node kinds of one job, kept from layout to layout."""

    structure: ModelStructure
    workload: Workload
    cluster: Cluster
    profile: FrameworkProfile
    job: Job = field(init=False)
    _sensitivity: list[Sensitivity] = field(init=False)
    _first: dict[tuple[object, ...], tuple[Evaluation, Costs]] = field(factory=dict, init=False)
    _facts: dict[tuple[object, ...], AffineFacts] = field(factory=dict, init=False)
    _costs: dict[tuple[object, ...], NodeCost] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.job = Job(self.structure, self.workload, self.cluster, self.profile)
        self._sensitivity = [sensitivity(kind.node) for kind in self.structure.kinds]

    def bare_table(self, layout: Layout) -> BareTable:
        """Return the costs of all node kinds under this layout without recompute."""
        key = node_cost_key(layout)
        simplest = {seen: self._simplest(seen, key) for seen in {*self._sensitivity}}
        nodes = [self._cost(i, *simplest[seen]) for i, seen in enumerate(self._sensitivity)]
        return bare_table(self.job, layout, nodes)

    def rows(self, x: Layouts) -> tuple[Rows, Rows, Rows, Rows]:
        """Return the costs of all node kinds under many layouts, one array for each of SEARCHED_COSTS.

        Shapes: [layouts, kinds, columns], [layouts, kinds, recompute parts, MODULE_COLUMNS], [layouts, kinds], and
        [layouts, kinds].
        """
        out, distinct = [], self._distinct(x)
        for i, seen in enumerate(self._sensitivity):
            layouts, which = distinct[seen.experts, seen.tokenwise]
            nodes = [self._cost(i, *simplest) for simplest in layouts]
            columns = ([getattr(n, name) for n in nodes] for name in SEARCHED_COSTS)
            out.append([np.array(column, dtype=float)[which] for column in columns])
        rows, by_part, full, workspace = (np.stack(column, axis=1) for column in zip(*out, strict=True))
        wait_for_host(self.structure, rows, by_part)
        return rows, by_part, full, workspace

    def _distinct(self, x: Layouts) -> dict[tuple[bool, bool], tuple[list[Simplest], Column]]:
        """Return, by sensitivity, the simplest layout of each distinct cost, and the number of each layout's cost."""
        tokens = {True: (x.micro_batch * (self.workload.seq // x.cp),), False: (x.micro_batch, x.cp)}
        experts: dict[bool, tuple[Column, ...]] = {
            True: (x.ep, x.etp, x.microbatch_overlap_bits),
            False: (x.has_overlap(Overlap.TENSOR).astype(np.int64),),
        }
        out: dict[tuple[bool, bool], tuple[list[Simplest], Column]] = {}
        for seen in self._sensitivity:
            if (key := (seen.experts, seen.tokenwise)) not in out:
                sharding = (x.tp, x.sequence_parallel, x.vocab_multiple, x.grad_reduce)
                first, which = alike(*sharding, *tokens[seen.tokenwise], *experts[seen.experts])
                columns = (np.asarray(getattr(x, name))[first].tolist() for name in NODE_COST_FIELDS)
                out[key] = [self._simplest(seen, values) for values in zip(*columns, strict=True)], which
        return out

    def shared(self, layout: Layout) -> tuple[int, ...]:
        """Return the elements on one device of each weight that several nodes share."""
        nodes, seq = self.structure.graph.nodes, self.workload.seq
        sizes, shared = Sizes(batch=layout.micro_batch, seq=seq), self.structure.shared_weights
        return tuple(program(nodes[at[0]]).local_elements(w.dims, (), sizes, layout.split) for w, at in shared)

    def node_cost(self, i: int, layout: Layout) -> NodeCost:
        """Return the cost of node kind i under a layout, without recompute."""
        return self._cost(i, *self._simplest(self._sensitivity[i], node_cost_key(layout)))

    def _cost(self, i: int, x: Layout, seq: int, split: Split) -> NodeCost:
        """Return the cost of node kind i under a simplest layout."""
        key = (i, split, x.micro_batch, x.overlaps, x.grad_reduce, seq)
        if key not in self._costs:
            execution, facts = self._facts_of(i, split, x.micro_batch, seq)
            self._costs[key] = node_cost(self.job, self.structure.kinds[i], facts, execution, x, seq)
        return self._costs[key]

    def _simplest(self, seen: Sensitivity, key: tuple[Any, ...]) -> Simplest:
        """Return the simplest layout, with its sequence length, under which such a node costs what it does here.

        key: the values of NODE_COST_FIELDS.
        """
        tp, cp, ep, etp, sequence_parallel, micro_batch, overlap_bits, vocab_multiple, grad_reduce = key
        seq = self.workload.seq
        if not seen.experts:
            ep, etp, overlap_bits = 1, 1, overlap_bits & Overlap.TENSOR.bit
        if seen.tokenwise and seq % cp == 0:
            seq, cp, micro_batch = micro_batch * (seq // cp), 1, 1
        simplest = Layout(
            tp=tp,
            cp=cp,
            ep=ep,
            etp=etp,
            sequence_parallel=sequence_parallel,
            micro_batch=micro_batch,
            overlaps=OverlapSet(overlap_bits),
            vocab_multiple=vocab_multiple,
            grad_reduce=GradReduce(grad_reduce),
        )
        return simplest, seq, simplest.split

    def _facts_of(self, i: int, split: Split, micro_batch: int, seq: int) -> tuple[Execution, Costs]:
        """Return how the runtime runs node kind i under a sharding, and its facts for a micro-batch.

        The first number of tokens takes one evaluation, the second one another, all later ones none.
        """
        node, tokens = self.structure.kinds[i].node, micro_batch * seq
        if (key := (i, split)) not in self._first:
            execution = self.job.execution(node, split)
            share = self._sensitivity[i].share
            first = Evaluation(execution, micro_batch * (share // gcd(share, tokens)), seq)
            self._first[key] = first, first.costs(node, split)
        first, facts = self._first[key]
        if tokens == first.batch * first.seq:
            return first.execution, facts
        if key not in self._facts:
            twice = evolve(first, batch=2 * first.batch)
            self._facts[key] = AffineFacts.of(facts, twice.costs(node, split), first.batch * first.seq)
        return first.execution, self._facts[key].at(tokens)


def node_cost_key(layout: Layout) -> tuple[Any, ...]:
    """Return the values of a layout on which node costs depend."""
    key: tuple[Any, ...] = NODE_COSTS_OF(layout)
    return key


def sensitivity(node: Node) -> Sensitivity:
    """Return the parts of a layout that the cost of this node depends on."""
    p = program(node)
    dims = [d for step in p.steps for v in (step.value, *step.value.args) for d in (*step.outer, *v.shape)]
    experts = any(step.table.axis(d) == "ep" for step in p.steps for d in (*step.outer, *step.value.shape))
    tokenwise = all(map(_tokenwise, p.steps)) and _has_tokens(p)
    return Sensitivity(experts, tokenwise, lcm(*(d.share.denominator for d in dims)))


def _tokenwise(step: Step) -> bool:
    """Return True if an op treats each token by itself."""
    mixes = any(SEQUENCES & (reads.mixed | reads.offset) for reads in step.reads)
    return not mixes and "source" not in step.value.shape


def _has_tokens(p: Program) -> bool:
    """Return True if all tensors but weights have both batch and seq, or slots made of them."""
    tensors = [v for step in p.steps for v in (step.value, *step.value.args) if not isinstance(v.source.op, Weight)]
    shapes = [v.shape for v in tensors if not isinstance(v.op, Select) or not isinstance(v.args[0].source.op, Weight)]
    return all(("batch" in s and "seq" in s) or any(d.of for d in s) for s in shapes)
