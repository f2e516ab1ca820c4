"""The stages of a plan in whole layers, which is how other programs cut a model.

Protocol: `parts` says what each stage holds, or refuses a stage that begins or ends inside of a layer; `whole` is the
plan cut anew such that none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from attrs import evolve, frozen

from megaloom.dsl import (
    Graph,
    Model,
    UserError,
    graph,
)
from megaloom.planner.contract.layout import Layout, Recompute
from megaloom.planner.contract.plans import Plan

from .decoder import GPT, called, cannot

RECUT = "plan with --runtime megatron, which cuts a model between whole layers"


@frozen
class Part:
    """What one stage holds: layers [first, last), and whether the embedding, and the norms and the logits."""

    first: int
    last: int
    embedding: bool
    head: bool
    ahead: int = 0  # layers that predict tokens further ahead

    @property
    def layers(self) -> int:
        """How many."""
        return self.last - self.first

    def __str__(self) -> str:
        """In the letters of megatron-core's `PipelineParallelLayerLayout`."""
        layers = "t" * self.layers if self.layers < 4 else f"t*{self.layers}"
        return "E" * self.embedding + layers + "m" * self.ahead + "L" * self.head


def parts(plan: Plan, model: GPT, nodes: Graph, target: str) -> tuple[Part, ...]:
    """What each stage holds, in model order. Raises UserError where a stage is not of whole layers."""
    place = {
        0: 0,
        **{at: i for i, at in enumerate(model.starts)},
    }  # how many layers begin before a node, those ahead too
    for i, stage in enumerate(plan.stages):
        if stage.start not in place:
            cannot(target, f"stage {i}, which begins inside of a layer with {called(nodes.nodes[stage.start])}", RECUT)
    layers, last = len(model.layers), len(plan.stages) - 1
    firsts = [place[stage.start] for stage in plan.stages]
    ends = [*firsts[1:], layers + model.ahead]
    return tuple(
        Part(min(a, layers), min(b, layers), i == 0, i == last, ahead=max(b, layers) - max(a, layers))
        for i, (a, b) in enumerate(zip(firsts, ends, strict=True))
    )


def recomputed(x: Layout, model: GPT, target: str) -> int | None:
    """How many layers of each stage are computed again, from its first on: None when all of them are.

    Raises UserError where what is computed again is not a layer.
    """
    if x.recompute is not Recompute.FULL:
        return 0
    if not model.repeated:
        cannot(target, "recompute full, of blocks that are not a layer each", "plan with --recompute none or selective")
    return x.recompute_layers or None


def even(found: Sequence[Part]) -> int | None:
    """The layers of each stage, if all have as many; None if not."""
    counts = {part.layers for part in found}
    return counts.pop() if len(counts) == 1 else None


def layout(found: Sequence[Part]) -> str:
    """The stages as megatron-core reads them, runs of equal ones as such: Ettt|(tt|)*5ttL."""
    out = ""
    for said, run in groupby(map(str, found)):
        times = len(list(run))
        last = said.endswith("L")
        out += said if last else f"({said}|)*{times}" if times > 1 else f"{said}|"
    return out


def whole(plan: Plan, model: Model, read: GPT) -> Plan:
    """The same layout, its stages cut anew at whole layers if they are not, and priced. UserError if that cannot be."""
    from megaloom.planner.partition.whole_blocks import Whole
    from megaloom.planner.search.search import price

    g, x = graph(model), plan.layout
    # Of two ranks the first would predict ahead, with another copy of its embedding, if heads had a stage of their own.
    stages, borders = x.pp * x.vpp, frozenset(read.starts[:-1] if read.ahead and x.pp == 2 else read.starts)
    if all(stage.start in borders for stage in plan.stages[1:]):
        return plan
    if stages - 1 > len(borders):
        raise UserError(f"{stages} stages of whole layers cannot be made of {len(read.layers)} layers\n{RECUT}")
    found = price(Whole(g.name, g.nodes, g.outputs, borders), x, plan.cluster, plan.workload, plan.runtime)
    if not found.partition.fits:
        raise UserError(f"cut at whole layers, {x} does not fit the memory of {plan.cluster}\n{RECUT}")
    return evolve(plan, stages=found.stages, predicted=found.prediction)
