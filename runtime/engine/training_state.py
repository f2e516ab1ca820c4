"""The state that training changes on a rank, and its form in checkpoints.

A checkpoint of the state does not depend on the layout: names, types and global shapes are those of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import define, field
from megatron.core import tensor_parallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megaloom.dsl import Graph
from megaloom.runtime.body.corrections import corrections_of
from megaloom.runtime.megatron.optimizer_state import AVERAGE, MODEL, restore_optimizer_state, sharded_optimizer_state
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.modules.model_chunk import ModelChunk
from megaloom.runtime.optimizer.averaged_weights import AveragedWeights
from megaloom.runtime.optimizer.optimizer import TrainedChunk, make_optimizer, make_scheduler, share_grad_scaler, wrap
from megaloom.runtime.optimizer.parameter_groups import ParameterGroup, assign_groups
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.optimizer.weight_update import SharedGradScaler

from .rank_model import RankModel


@define(eq=False)
class TrainingState:
    """Weights, optimizer, loss scale, schedule, averaged weights, and counts of steps."""

    groups: ProcessGroups
    chunks: list[TrainedChunk]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    scaler: SharedGradScaler | None  # of fp16
    averages: AveragedWeights | None
    done: int = field(default=0, init=False)  # steps, skipped ones included
    skipped: int = field(default=0, init=False)  # steps, of those done
    loads_average: bool = field(default=False, init=False)  # whether the checkpoint to load has averaged weights

    @classmethod
    def of(
        cls,
        part: RankModel,
        recipe: Recipe,
        parameter_groups: Sequence[ParameterGroup],
        average: float | None,
    ) -> TrainingState:
        """Return the state of a run at step 0. average: see `shard`."""
        config, groups = part.config, part.groups
        config.moe_router_bias_update_rate = recipe.bias_update_rate
        assign_groups(part.chunks, parameter_groups)
        chunks = wrap(part.chunks, config, groups, recipe.ddp_bucket_size)
        if groups.layout.fsdp:
            part.fill_rows()
        optimizer = make_optimizer(recipe, chunks, config, groups, parameter_groups)
        config.grad_scale_func = optimizer.scale_loss
        return cls(
            groups,
            chunks,
            optimizer,
            make_scheduler(recipe, optimizer),
            share_grad_scaler(recipe, optimizer, part.plan.workload.tokens) if config.fp16 else None,
            None if average is None else AveragedWeights.of(optimizer, chunks, average),
        )

    @property
    def graph(self) -> Graph:
        """Return the graph of the model."""
        graph: Graph = self.model_chunks[0].graph
        return graph

    @property
    def model_chunks(self) -> list[ModelChunk]:
        """Return this rank's model chunks, without their DDP wrappers."""
        return [chunk.module for chunk in self.chunks]

    def zero_gradients(self) -> None:
        """Set all gradients to zero."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def set_training(self, training: bool) -> None:
        """Switch dropout and the balancing losses on or off."""
        for chunk in self.chunks:
            chunk.train(training)

    def seed_dropout(self, seed: int) -> None:
        """Seed the dropout of fused attention and of experts, whose masks depend on the layout, from the step number.

        So a resumed run draws the masks of an uninterrupted one. Ranks of a tensor-parallel group share the seed, hence
        the masks of replicated tensors. Masks of sharded tensors are drawn under megatron-core's RNG tracker, which
        adds the rank.
        """
        ranks = (self.groups.dp_rank, self.groups.cp_rank, self.groups.pp_rank)
        (drawn,) = np.random.SeedSequence((seed, self.done, *ranks)).generate_state(1)
        tensor_parallel.model_parallel_cuda_manual_seed(int(drawn), force_reset_rng=True)

    def moving_buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Return the corrections of router scores, which move with the gradients, and their values."""
        return [(c.value, c.value.clone()) for c in corrections_of(self.chunks)]

    def end_step(self, *, skipped: bool) -> None:
        """Move averages, loss scale and schedule on, after the weights.

        The schedule waits in a skipped step. Source: Megatron-LM, megatron/training/training.py, train_step.
        """
        self.done += 1
        if self.scaler:
            self.scaler.settle(overflow=skipped)
        if skipped:
            self.skipped += 1
            return
        if self.averages:
            self.averages.update()
        self.scheduler.step(1)

    def sharded_state(self, *, loading: bool = False) -> dict[str, Any]:
        """Return the state as sharded tensors for megatron.core.dist_checkpointing.

        With `loading`, tensors are empty, to load into.
        """
        averages = self.averages.values if self.averages and (self.loads_average or not loading) else None
        state = sharded_optimizer_state(self._parameters(), self.optimizer, averages, loading=loading)
        scale = {"loss_scale": self.scaler.state_dict()} if self.scaler else {}
        return {**state, "done": self.done, "skipped": self.skipped, **scale}

    def load_state(self, loaded: dict[str, Any]) -> None:
        """Take over weights, optimizer state and step count that were loaded into `sharded_state(loading=True)`."""
        for chunk in self.model_chunks:
            chunk.load(loaded[MODEL])
        self.skipped = loaded.get("skipped", 0)
        updates = loaded["done"] - self.skipped
        averages = self.averages.values if self.averages and AVERAGE in loaded else None
        restore_optimizer_state(loaded, self._parameters(), self.optimizer, averages, steps=updates)
        if self.averages and averages is None:
            self.averages.restart()
        if self.scaler and "loss_scale" in loaded:
            self.scaler.load_state_dict(loaded["loss_scale"])
        self.done = loaded["done"]
        self.scheduler.step(updates - self.scheduler.num_steps)

    def _parameters(self) -> dict[str, Any]:
        """Return this rank's sharded parameters, by name."""
        metadata = {"dp_cp_group": self.groups.collection.dp_cp}
        return {k: v for c in self.model_chunks for k, v in c.sharded_state_dict(metadata=metadata).items()}


def restore(buffers: list[tuple[Tensor, Tensor]]) -> None:
    """Copy values back into buffers."""
    for buffer, value in buffers:
        buffer.copy_(value)
