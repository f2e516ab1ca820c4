"""This rank's part of a model under a plan: its model chunks, with the values of their weights."""

from __future__ import annotations

from collections.abc import Collection

from attrs import evolve, frozen
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megaloom.dsl import Graph, Model, Slot, graph
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.build_context import make_build_context
from megaloom.runtime.megatron.process_groups import ProcessGroups, create_process_groups
from megaloom.runtime.modules.initial_weights import GivenValues, check_weights, given_weight, initial_weight
from megaloom.runtime.modules.model_chunk import ModelChunk
from megaloom.runtime.modules.parameters import Draw
from megaloom.runtime.modules.shared_weights import SharedGradients, share_between_chunks, share_between_ranks
from megaloom.runtime.weights.views import View


def no_values(slot: Slot, index: int | None) -> Tensor | View:
    """Raise AssertionError: a model that was built without values has none to give."""
    raise AssertionError(f"{slot.name} has no values")


@frozen(eq=False)
class RankModel:
    """The model chunks of a rank, in the order of the pipeline, and what they were built from."""

    plan: Plan
    graph: Graph
    groups: ProcessGroups
    chunks: list[ModelChunk]
    draw: Draw = no_values  # of the values of weights

    @classmethod
    def build(
        cls,
        plan: Plan,
        model: Model,
        seed: int,
        weights: GivenValues | None = None,
        drawn: Collection[str] = (),
        *,
        sharded: bool = False,
    ) -> RankModel:
        """Return the chunks of a plan that the runtime can train. torch.distributed has as many ranks as the plan.

        weights: given values; without them, and for the names in `drawn`, the seed draws initial ones. sharded: the
        parameters are on the meta device; once they are sharded over data-parallel ranks, `fill_rows` fills them.
        """
        g = graph(model)
        if weights is not None:
            check_weights(g, weights, drawn)
        groups = create_process_groups(plan.layout)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)

        def draw(slot: Slot, index: int | None) -> Tensor | View:
            if weights is None or slot.name not in weights:
                return given_weight(slot, {slot.name: initial_weight(slot, seed, device.current())}, index)
            return given_weight(slot, weights, index)

        part = evolve(cls.without_values(plan, g, groups, on_meta=sharded), draw=draw)
        for node in (node for chunk in part.chunks for node in chunk.nodes):
            node.fill(draw)
        share_between_chunks([chunk.shared for chunk in part.chunks])
        return part

    @classmethod
    def without_values(cls, plan: Plan, g: Graph, groups: ProcessGroups, *, on_meta: bool = False) -> RankModel:
        """Return chunks whose weights have no values yet, each with parameters of its own for the weights it shares."""
        context = make_build_context(g, plan.layout, plan.workload, groups, plan.environment)
        stages = sorted((s for s in plan.stages if s.rank == groups.pp_rank), key=lambda s: s.chunk)
        return cls(plan, g, groups, [ModelChunk(g, stage, context, on_meta=on_meta) for stage in stages])

    def fill_rows(self) -> None:
        """Give values to the rows of sharded parameters that this rank holds."""
        for node in (node for chunk in self.chunks for node in chunk.nodes):
            node.fill_rows(self.draw)

    @property
    def config(self) -> TransformerConfig:
        """The configuration that all chunks share, and the schedules read."""
        return self.chunks[0].config

    def shared_gradients(self) -> SharedGradients:
        """Return the parameters that other pipeline ranks have copies of. Every rank calls it, before DDP is made."""
        uses = [chunk.shared for chunk in self.chunks]
        return share_between_ranks(self.graph, self.plan.stages, uses, self.groups)

    def return_predictions(self) -> None:
        """Return what the losses read as well, such as logits, from each forward pass."""
        for chunk in self.chunks:
            chunk.return_predictions()
