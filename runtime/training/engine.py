"""The engine: one rank's part of the model, its optimizer, and one optimizer step through megatron-core's schedules.

A step is data step, forward step, loss reduction. The engine neither reads files nor prints; `loop` does.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import define, frozen
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

from megaloom.dsl import (
    Graph,
    Model,
    Slot,
    graph,
)
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.build_context import make_build_context
from megaloom.runtime.megatron.optimizer_state import restore_optimizer_state, sharded_optimizer_state
from megaloom.runtime.megatron.process_groups import ProcessGroups, create_process_groups
from megaloom.runtime.modules import parameters
from megaloom.runtime.modules.initial_weights import initial_weight
from megaloom.runtime.modules.model_chunk import ModelChunk

from .optimizer import make_optimizer, make_scheduler, wrap_in_ddp
from .recipe import Recipe

Batch = Callable[[int], Tensor]  # maps i to sample i of a global batch: int64 token ids [seq + 1]


@frozen
class StepResult:
    """Result of one optimizer step, equal on all ranks."""

    loss: float  # mean over the tokens of the global batch, nats per token
    grad_norm: float  # before clipping
    lr: float


@define(eq=False)
class Engine:
    """This rank's part of the model under a plan, ready to train."""

    plan: Plan
    graph: Graph
    recipe: Recipe
    groups: ProcessGroups
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    @property
    def done(self) -> int:
        """Return the number of optimizer steps done."""
        return int(self.scheduler.num_steps)

    @classmethod
    def build(cls, plan: Plan, model: Model, recipe: Recipe) -> Engine:
        """Build this rank's model chunks, optimizer and schedule. Initial weights do not depend on the layout.

        torch.distributed must be initialized with as many ranks as the plan has. Raise UserError for a model that the
        runtime cannot train.
        """
        g, groups = graph(model), create_process_groups(plan.layout)
        context = make_build_context(g, plan.layout, plan.workload, groups)
        config = context.config
        tensor_parallel.model_parallel_cuda_manual_seed(recipe.seed)
        own_stages = [s for s in plan.stages if s.rank == groups.pp_rank]
        model_chunks = [ModelChunk(g, s, context) for s in sorted(own_stages, key=lambda s: s.chunk)]

        def draw(slot: Slot, index: int | None) -> Tensor:
            return initial_weight(slot, recipe.seed, index)

        for chunk in model_chunks:
            for node, module in chunk.node_modules():
                full = parameters.node_parameters(node, module, draw, groups)
                parameters.fill_shards(module, full, groups)
        chunks = wrap_in_ddp(model_chunks, config, groups)
        optimizer = make_optimizer(recipe, chunks, config, groups)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss
        return cls(plan, g, recipe, groups, chunks, optimizer, make_scheduler(recipe, optimizer))

    def step(self, batch: Batch) -> StepResult:
        """Train on one global batch. `batch(i)` is called for this rank's samples only."""
        self._seed_dropout()
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self._run(batch, forward_only=False)
        lr = self.optimizer.param_groups[0]["lr"]
        _, norm, _ = self.optimizer.step()
        self.scheduler.step(1)
        return StepResult(loss, float(norm), float(lr))

    def evaluate(self, batch: Batch, count: int) -> float:
        """Return the mean loss over `count` global batches, in nats per token, with i up to count · global batch."""
        for chunk in self.chunks:
            chunk.eval()
        size = self.plan.workload.batch

        def batch_from(first: int) -> Batch:
            return lambda i: batch(first + i)

        with torch.no_grad():
            return sum(self._run(batch_from(k * size), forward_only=True) for k in range(count)) / count

    def _run(self, batch: Batch, *, forward_only: bool) -> float:
        """Run all micro-batches through the pipeline. Return the mean loss per token, equal on all ranks."""
        layout, workload = self.plan.layout, self.plan.workload
        count = layout.microbatches(workload.batch)
        feeds = [self._microbatches(batch, count) for _ in self.chunks]  # each chunk has its own iterator over all
        losses = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=feeds if len(feeds) > 1 else feeds[0],
            model=self.chunks if len(feeds) > 1 else self.chunks[0],
            num_microbatches=count,
            seq_length=workload.seq,
            micro_batch_size=layout.micro_batch,
            decoder_seq_length=workload.seq,
            forward_only=forward_only,
        )
        total = torch.zeros(2, dtype=torch.float64, device=device.current())
        if self.groups.is_last_pipeline_rank and self.groups.tp_rank == 0:
            for loss in losses:
                total += loss["sum_and_tokens"]
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def _microbatches(self, batch: Batch, count: int) -> Iterator[dict[str, Tensor]]:
        """Yield this rank's micro-batches, tokens and labels [micro_batch, seq / cp].

        Micro-batch k of data-parallel rank r is the global micro-batch k · dp + r. So the samples that share a
        micro-batch do not depend on dp.
        """
        layout = self.plan.layout
        for k in range(count):
            start = (k * layout.dp + self.groups.dp_rank) * layout.micro_batch
            x = torch.stack([batch(start + j) for j in range(layout.micro_batch)]).to(device.current())
            yield get_batch_on_this_cp_rank({"tokens": x[:, :-1].contiguous(), "labels": x[:, 1:].contiguous()})

    def _forward_step(self, feed: Iterator[dict[str, Tensor]], chunk: DistributedDataParallel) -> tuple[Tensor, Any]:
        """Run a micro-batch through a chunk. Return its output and the loss reduction, as the schedules ask."""
        return chunk(**next(feed)), reduce_loss

    def _seed_dropout(self) -> None:
        """Seed dropout from the step number, so that a resumed run draws the masks of an uninterrupted one.

        Ranks of a tensor-parallel group share the seed, hence the masks of replicated tensors. Masks of sharded tensors
        are drawn under megatron-core's RNG tracker, which adds the rank.
        """
        ranks = (self.groups.dp_rank, self.groups.cp_rank, self.groups.pp_rank)
        (seed,) = np.random.SeedSequence((self.recipe.seed, self.done, *ranks)).generate_state(1)
        tensor_parallel.model_parallel_cuda_manual_seed(int(seed), force_reset_rng=True)

    @property
    def model_chunks(self) -> list[ModelChunk]:
        """Return this rank's model chunks, without their DDP wrappers."""
        return [chunk.module for chunk in self.chunks]

    def sharded_state(self, *, loading: bool = False) -> dict[str, Any]:
        """Return the training state as sharded tensors for megatron.core.dist_checkpointing.

        Names, types and global shapes do not depend on the plan. With `loading`, tensors are empty, to load into.
        """
        return {**sharded_optimizer_state(self._parameters(), self.optimizer, loading=loading), "done": self.done}

    def load_state(self, loaded: dict[str, Any]) -> None:
        """Take over weights, optimizer state and step count that were loaded into `sharded_state(loading=True)`."""
        for chunk in self.model_chunks:
            chunk.load(loaded["model"])
        restore_optimizer_state(loaded, self._parameters(), self.optimizer, steps=loaded["done"])
        self.scheduler.step(loaded["done"] - self.done)

    def _parameters(self) -> dict[str, Any]:
        """Return this rank's sharded parameters, by name."""
        metadata = {"dp_cp_group": self.groups.collection.dp_cp}
        return {k: v for c in self.model_chunks for k, v in c.sharded_state_dict(metadata=metadata).items()}

    def peak_memory(self) -> int:
        """Return this rank's peak memory in bytes: on a GPU what torch allocated, on CPU the whole process."""
        if device.gpu_count():
            return int(torch.cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reduce_loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return a micro-batch's summed loss, its number of tokens, and a report with the sum and the tokens."""
    count = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    total = losses.sum()
    report = torch.stack([total.detach().double(), count.double()])
    return total, count, {"sum_and_tokens": report}
