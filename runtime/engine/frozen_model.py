"""A frozen model beside an engine, under the same device mesh: the reference of DPO, or a teacher.

It has the weights of this rank's shards and nothing else: no gradients, no buffers of DDP, no optimizer. Under a layout
that shards weights or gradients it shards its weights, which are gathered unit by unit. Before a step it runs forward
over the batch, and what it computes goes with the batch to the step of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from megaloom.dsl import Graph, Model, UserError
from megaloom.planner.contract.plans import Plan
from megaloom.planner.rules.plan_check import check_trainable
from megaloom.runtime.launch.agreement import agreed
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.megatron.weight_shards import own_values
from megaloom.runtime.modules.initial_weights import GivenValues
from megaloom.runtime.modules.model_chunk import ModelChunk
from megaloom.runtime.modules.shared_weights import SharedGradients, share_between_chunks
from megaloom.runtime.ops.dropout_masks import MaskSource
from megaloom.runtime.optimizer.optimizer import gather_weights
from megaloom.runtime.optimizer.sharded_chunk import ShardedChunk
from megaloom.runtime.samples.samples import Sample

from .engine import Engine
from .loss_totals import LossTerms
from .outputs import Outputs
from .own_batches import named_samples
from .pipeline_run import INSIDE, PipelineRun
from .rank_model import RankModel
from .shared_batches import SharedBatches, is_absent
from .steps import Forward, MicroBatch, Sums

NewTensors = Callable[[Outputs, MicroBatch], Mapping[str, Tensor]]
"""Makes named tensors [sequences ..] of the outputs of a micro-batch, and of the micro-batch."""
UNUSED_SEED = 0  # of generators that megatron-core needs; nothing is drawn


@frozen
class Collected:
    """A function that makes tensors of the outputs of a micro-batch, and what it has returned so far."""

    make: NewTensors
    found: list[Mapping[str, Tensor]] = field(factory=list)


@define(eq=False)
class FrozenModel:
    """This rank's part of a model that is not trained."""

    plan: Plan
    graph: Graph
    groups: ProcessGroups
    pipeline: PipelineRun
    shared: SharedBatches
    collected: Collected | None = field(default=None, init=False)  # while `extend` runs

    @classmethod
    def build(cls, plan: Plan, model: Model, weights: GivenValues) -> FrozenModel:
        """Return this rank's part of a model with given weights. For its use and its errors see `shard_frozen`."""
        check_trainable(plan, model)
        part = RankModel.build(plan, model, UNUSED_SEED, weights, sharded=plan.layout.fsdp)
        chunks = _frozen(part)
        if plan.layout.fsdp:
            part.fill_rows()
        return cls._of(part, chunks)

    @classmethod
    def of(cls, engine: Engine) -> FrozenModel:
        """Return a frozen copy of an engine's model with its present weights. Every rank calls it."""
        plan = engine.plan
        part = RankModel.without_values(plan, engine.graph, engine.groups, on_meta=plan.layout.fsdp)
        share_between_chunks([chunk.shared for chunk in part.chunks])
        chunks = _frozen(part)
        gather_weights(engine.state.chunks)
        for chunk, trained in zip(part.chunks, engine.model_chunks, strict=True):
            _copy_state(trained, chunk)
        return cls._of(part, chunks)

    @classmethod
    def _of(cls, part: RankModel, chunks: list[Any]) -> FrozenModel:
        plan, g, groups = part.plan, part.graph, part.groups
        terms, none = LossTerms.of(g, plan.layout.cp), SharedGradients(())
        pipeline = PipelineRun(plan, g, groups, chunks, terms, none, own_steps=True, reads_more=True)
        return cls(plan, g, groups, pipeline, SharedBatches(groups, g, plan.workload.seq, more=True))

    @property
    def model_chunks(self) -> list[ModelChunk]:
        """Return this rank's model chunks, without what gathers their weights."""
        return [chunk.module if isinstance(chunk, ShardedChunk) else chunk for chunk in self.pipeline.chunks]

    def extend(self, batch: Mapping[str, Tensor] | None, tensors: NewTensors) -> dict[str, Tensor]:
        """Return the batch of this data-parallel rank with more tensors on the ranks of the last pipeline stage.

        batch: named tensors [sequences ..], given as to `Engine.step`; each data-parallel rank has one of its own.
        tensors: returns the new tensors [sequences ..] of each micro-batch, as a step sees it, without gradients. Each
        row must depend on its own sequence alone. Every rank makes the call, outside of steps.
        """
        _check_outside(self.plan.layout.pp)
        whole = self.shared.of(batch)
        samples = agreed(partial(self._samples_of, whole))
        part = self.pipeline.own_part(len(samples), self.plan.layout.micro_batch)
        masks = MaskSource(UNUSED_SEED, step=0, first_sample=0)
        self.collected = Collected(tensors)
        with torch.no_grad():
            self.pipeline.run(samples.__getitem__, part, self._collecting_step, masks, forward_only=True)
        found, self.collected = self.collected.found, None
        return {**whole, **agreed(partial(_joined, found, whole, part.size))}

    def _collecting_step(self, forward: Forward, micro_batch: MicroBatch) -> Sums | None:
        """Run a micro-batch, and collect what is made of its outputs. The pipeline remembers each step that it runs."""
        outputs = forward(micro_batch)
        if outputs is None or self.collected is None:
            return None
        self.collected.found.append(self.collected.make(outputs, micro_batch))
        return outputs.loss_sum, outputs.weight_sum

    def _samples_of(self, batch: Any) -> list[Sample]:
        """Return the samples of a batch. Raise UserError if there is none."""
        if is_absent(batch):
            raise UserError(f"data-parallel rank {self.groups.dp_rank} has no batch: give each of them its own rows")
        if isinstance(batch, Tensor):
            raise UserError(
                "a batch of text has no names, which extend needs to add to it\n"
                f"give tensors by name: {', '.join(n.name for n in self.graph.nodes if n.is_input)}"
            )
        return named_samples(batch, self.graph, self.plan.workload.seq, more=True)


def _frozen(part: RankModel) -> list[Any]:
    """Return chunks that compute without gradients, and give what losses read; their weights sharded as in training."""
    part.return_predictions()
    for chunk in part.chunks:
        chunk.requires_grad_(False)
    sharded = part.groups.layout.fsdp
    chunks = [ShardedChunk(part.config, chunk, part.groups) for chunk in part.chunks] if sharded else part.chunks
    return [chunk.eval() for chunk in chunks]


@torch.no_grad()
def _copy_state(source: ModelChunk, target: ModelChunk) -> None:
    """Copy the weights that this rank has of a model chunk to another one, which is sharded as the first."""
    for x, y in zip(source.parameters(), target.parameters(), strict=True):
        own_values(y).copy_(own_values(x))
    for x, y in zip(source.buffers(), target.buffers(), strict=True):
        y.copy_(x)


def _check_outside(pp: int) -> None:
    """Raise UserError inside a step of a pipeline, where the stages would wait for one another for ever."""
    if INSIDE.get() and pp > 1:
        raise UserError(
            f"extend was called inside a step, which the {pp} pipeline stages run at different times\n"
            "call it with the whole batch, before engine.step"
        )


def _joined(found: list[Mapping[str, Tensor]], batch: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Return the tensors of micro-batches of `size` sequences as tensors of the batch. Raise UserError for others."""
    count = len(next(iter(batch.values())))
    for each in found:
        if not isinstance(each, Mapping) or not all(isinstance(x, Tensor) for x in each.values()):
            raise UserError("extend needs a function that returns a dict of tensors by name")
        if taken := sorted(each.keys() & batch.keys()):
            raise UserError(f"the batch has {', '.join(taken)} already\ngive what extend adds another name")
        for name, x in each.items():
            if not x.dim() or len(x) != size:
                raise UserError(
                    f"{name} has the shape {list(x.shape)}: it must have a row for each of {size} sequences"
                )
    return {name: torch.cat([each[name] for each in found])[:count] for name in (found[0] if found else ())}
