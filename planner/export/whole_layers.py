"""Pipeline stages of whole layers, which is how Megatron-LM, Megatron-Bridge, Accelerate and torchtitan cut a model.

`stage_layers` returns the layers of each stage of a plan; `cut_at_layers` balances the stages again if one
begins inside of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from attrs import evolve, frozen

from megaloom.dsl import Graph, Model, UserError, graph
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.partition.whole_blocks import RestrictedGraph
from megaloom.planner.search.pricing import price

from .decoder import DecoderModel, describe
from .target import Target, refuse

PLAN_AGAIN = "plan with --runtime megatron, which cuts a model between whole layers"


@frozen
class StageLayers:
    """One pipeline stage in whole layers: layers [first, last), and whether it has the embedding and the logits."""

    first: int
    last: int
    embedding: bool
    head: bool
    mtp: int = 0  # layers for multi-token prediction

    @property
    def layers(self) -> int:
        """The number of decoder layers."""
        return self.last - self.first

    def __str__(self) -> str:
        """Return the stage in the letters of megatron-core's `PipelineParallelLayerLayout`: Ettt, t*5mL."""
        layers = "t" * self.layers if self.layers < 4 else f"t*{self.layers}"
        return "E" * self.embedding + layers + "m" * self.mtp + "L" * self.head


def stage_layers(plan: Plan, model: DecoderModel, graph: Graph, target: Target) -> tuple[StageLayers, ...]:
    """Return the layers of each stage, in model order. Raises UserError where a stage begins inside of a layer."""
    layers_before = {0: 0, **{start: i for i, start in enumerate(model.layer_starts)}}  # those for MTP included
    for i, stage in enumerate(plan.stages):
        if stage.start not in layers_before:
            node = describe(graph.nodes[stage.start])
            refuse(target, f"stage {i}, which begins inside of a layer, with {node}", PLAN_AGAIN)
    layers, last_stage = len(model.layers), len(plan.stages) - 1
    firsts = [layers_before[stage.start] for stage in plan.stages]
    ends = [*firsts[1:], layers + model.mtp]
    return tuple(
        StageLayers(min(a, layers), min(b, layers), i == 0, i == last_stage, mtp=max(b, layers) - max(a, layers))
        for i, (a, b) in enumerate(zip(firsts, ends, strict=True))
    )


def recomputed_layers(x: Layout, model: DecoderModel, target: Target) -> int | None:
    """Return how many layers of each stage, from its first one, are recomputed in full; None for all of them.

    Raises UserError if the model's blocks, which full recompute recomputes, are not one layer each.
    """
    if x.recompute is not Recompute.FULL:
        return 0
    if not model.layer_per_block:
        what = "recompute full of a model whose blocks are not one layer each"
        refuse(target, what, "plan with --recompute none or --recompute selective")
    return x.recompute_layers or None


def equal_layers(stages: Sequence[StageLayers]) -> int | None:
    """Return the number of layers of each stage if all stages have as many, else None."""
    counts = {stage.layers for stage in stages}
    return counts.pop() if len(counts) == 1 else None


def pipeline_layout(stages: Sequence[StageLayers]) -> str:
    """Return the stages as megatron-core reads them, equal neighbours as a product: Ettt|(tt|)*5ttL."""
    out = ""
    for letters, equal in groupby(map(str, stages)):
        times = len(list(equal))
        last = letters.endswith("L")
        out += letters if last else f"({letters}|)*{times}" if times > 1 else f"{letters}|"
    return out


def cut_at_layers(plan: Plan, model: Model, decoder: DecoderModel) -> Plan:
    """Return the plan with stages of whole layers, balanced and priced again; the plan itself if it has such stages.

    Raises UserError if there are more stages than layers, or if the new stages do not fit the memory.
    """
    g, x = graph(model), plan.layout
    # At pp 2 the heads may not have a stage of their own: rank 0 would have the MTP layer and a second embedding.
    starts = decoder.layer_starts[:-1] if decoder.mtp and x.pp == 2 else decoder.layer_starts
    stages, cut_points = x.pp * x.vpp, frozenset(starts)
    if all(stage.start in cut_points for stage in plan.stages[1:]):
        return plan
    if stages - 1 > len(cut_points):
        raise UserError(f"{len(decoder.layers)} whole layers do not fill {stages} pipeline stages\n{PLAN_AGAIN}")
    priced = price(
        RestrictedGraph(g.name, g.nodes, g.outputs, cut_points), x, plan.cluster, plan.workload, plan.runtime
    )
    if not priced.partition.fits:
        raise UserError(f"with stages of whole layers, {x} does not fit the memory of {plan.cluster}\n{PLAN_AGAIN}")
    return evolve(plan, stages=priced.stages, predicted=priced.prediction)
