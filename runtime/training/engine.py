"""One optimizer step under a plan: data step → forward step → loss reduction, through megatron-core's schedules.

The engine is what a plan becomes on each rank. It neither reads files nor prints: `train` does.
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
from megaloom.runtime.megatron.process_groups import ProcessGroups, create_process_groups
from megaloom.runtime.modules import parameters
from megaloom.runtime.modules.initial_weights import initial_weight

from . import optimizer as optimization
from . import optimizer_state
from .model_chunk import ModelChunk
from .recipe import Recipe

Batch = Callable[[int], Tensor]  # sample i of a global batch: int64 token ids [seq + 1]


@frozen
class StepResult:
    """What one optimizer step did; the same on every rank."""

    loss: float  # mean over the tokens of the global batch, nats
    grad_norm: float  # before clipping
    lr: float


@define(eq=False)
class Engine:
    """A plan at work on this rank."""

    plan: Plan
    graph: Graph
    recipe: Recipe
    groups: ProcessGroups
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    @property
    def done(self) -> int:
        """Optimizer steps so far."""
        return int(self.scheduler.num_steps)

    @classmethod
    def build(cls, plan: Plan, model: Model, recipe: Recipe) -> Engine:
        """Build this rank's stages, with initial values that do not depend on the layout.

        torch.distributed must be up with as many ranks as the plan has. Raises UserError for a model that the
        runtime cannot train.
        """
        g, groups = graph(model), create_process_groups(plan.layout)
        context = make_build_context(g, plan.layout, plan.workload, groups)
        config = context.config
        tensor_parallel.model_parallel_cuda_manual_seed(recipe.seed)
        mine = [s for s in plan.stages if s.rank == groups.pp_rank]
        stages = [ModelChunk(g, s, context) for s in sorted(mine, key=lambda s: s.chunk)]

        def draw(slot: Slot, index: int | None) -> Tensor:
            return initial_weight(slot, recipe.seed, index)

        for stage in stages:
            for node, module in stage.node_modules():
                full = parameters.node_parameters(node, module, draw, groups)
                parameters.fill_shards(module, full, groups)
        chunks = optimization.replicate(stages, config, groups)
        optimizer = optimization.optimizer(recipe, chunks, config, groups)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss
        return cls(plan, g, recipe, groups, chunks, optimizer, optimization.schedule(recipe, optimizer))

    def step(self, batch: Batch) -> StepResult:
        """Train on one global batch; `batch(i)` is asked for this rank's samples alone."""
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
        """The mean loss of a token over `count` global batches, nats; batch(i) for i up to count · global batch."""
        for chunk in self.chunks:
            chunk.eval()
        size = self.plan.workload.batch

        def from_(first: int) -> Batch:
            return lambda i: batch(first + i)

        with torch.no_grad():
            return sum(self._run(from_(k * size), forward_only=True) for k in range(count)) / count

    def _run(self, batch: Batch, *, forward_only: bool) -> float:
        """Every micro-batch through the pipeline; returns the mean loss of a token, on all ranks."""
        layout, load = self.plan.layout, self.plan.workload
        micro = layout.microbatches(load.batch)
        feeds = [self._feed(batch, micro) for _ in self.chunks]  # each chunk reads all micro-batches by itself
        losses = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=feeds if len(feeds) > 1 else feeds[0],
            model=self.chunks if len(feeds) > 1 else self.chunks[0],
            num_microbatches=micro,
            seq_length=load.seq,
            micro_batch_size=layout.micro_batch,
            decoder_seq_length=load.seq,
            forward_only=forward_only,
        )
        total = torch.zeros(2, dtype=torch.float64, device=device.current())
        if self.groups.is_last_stage and self.groups.tp_rank == 0:
            for loss in losses:
                total += loss["sum_and_tokens"]
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def _feed(self, batch: Batch, micro: int) -> Iterator[dict[str, Tensor]]:
        """This rank's micro-batches. Micro-batch k of data-parallel rank r is the global one k · dp + r, so that
        which samples share a micro-batch does not depend on dp."""
        layout = self.plan.layout
        for k in range(micro):
            start = (k * layout.dp + self.groups.dp_rank) * layout.micro_batch
            x = torch.stack([batch(start + j) for j in range(layout.micro_batch)]).to(device.current())
            yield get_batch_on_this_cp_rank({"tokens": x[:, :-1].contiguous(), "labels": x[:, 1:].contiguous()})

    def _forward(self, feed: Iterator[dict[str, Tensor]], chunk: DistributedDataParallel) -> tuple[Tensor, Any]:
        return chunk(**next(feed)), reduce

    def _seed_dropout(self) -> None:
        """Dropout is drawn anew for each step from its number, so that a resumed run draws what it would have.

        Ranks of one tensor-parallel group begin with one seed: what all of them hold is masked alike. What each holds
        for itself is drawn under megatron-core's tracker, which adds their rank.
        """
        place = (self.done, self.groups.dp_rank, self.groups.cp_rank, self.groups.pp_rank)
        (seed,) = np.random.SeedSequence((self.recipe.seed, *place)).generate_state(1)
        tensor_parallel.model_parallel_cuda_manual_seed(int(seed), force_reset_rng=True)

    @property
    def stages(self) -> list[ModelChunk]:
        """This rank's chunks of the model, without their wrappers."""
        return [chunk.module for chunk in self.chunks]

    def sharded_state(self, *, loading: bool = False) -> dict[str, Any]:
        """Everything that training needs to go on, for megatron.core.dist_checkpointing: names, types and global
        shapes that no plan changes, with this rank's shares, or to load with room for them."""
        return {**optimizer_state.sharded(self._parameters(), self.optimizer, loading=loading), "done": self.done}

    def load_state(self, loaded: dict[str, Any]) -> None:
        """Go on from what `sharded_state(loading=True)` was filled with."""
        for stage in self.stages:
            stage.load(loaded["model"])
        optimizer_state.restore(loaded, self._parameters(), self.optimizer, steps=loaded["done"])
        self.scheduler.step(loaded["done"] - self.done)

    def _parameters(self) -> dict[str, Any]:
        """This rank's shares of the model's parameters, by name."""
        meta = {"dp_cp_group": self.groups.collection.dp_cp}
        return {k: v for s in self.stages for k, v in s.sharded_state_dict(metadata=meta).items()}

    def peak_memory(self) -> int:
        """The most memory this rank has held, in bytes: on a GPU what torch allocated, else the whole process's."""
        if device.gpus():
            return int(torch.cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reduce(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The sum of a micro-batch's losses to differentiate, the number of tokens to divide by, and both to report."""
    count = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    total = losses.sum()
    report = torch.stack([total.detach().double(), count.double()])
    return total, count, {"sum_and_tokens": report}
