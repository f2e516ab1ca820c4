"""The engine: one rank's part of the model, its optimizer, and one optimizer step through megatron-core's schedules.

A step is data step, forward step, loss reduction. The engine neither reads files nor prints; `loop` does.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import define, field, frozen
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megaloom.dsl import (
    DType,
    Graph,
    Model,
    Slot,
    UserError,
    graph,
)
from megaloom.dsl.sharding_table import SEQUENCES
from megaloom.planner.contract.plans import Plan
from megaloom.planner.rules.plan_check import check_trainable
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.build_context import make_build_context
from megaloom.runtime.megatron.kernels import zigzag
from megaloom.runtime.megatron.optimizer_state import restore_optimizer_state, sharded_optimizer_state
from megaloom.runtime.megatron.process_groups import ProcessGroups, create_process_groups
from megaloom.runtime.modules import parameters
from megaloom.runtime.modules.initial_weights import initial_weight
from megaloom.runtime.modules.model_chunk import ModelChunk
from megaloom.runtime.reference.dropout import MaskSource

from .loss_weights import weight_sums
from .optimizer import make_optimizer, make_scheduler, share_grad_scaler, wrap_in_ddp
from .recipe import Recipe
from .samples import Sample, check_sample
from .steps import Forward, Losses, MicroBatch, Outputs, Steps, Sums, complete
from .weight_update import NonFiniteError, SharedGradScaler, first_bad_gradient, first_bad_output, update_weights

Step = Callable[[Forward, MicroBatch], Sums | None]
Samples = Callable[[int], Sample]  # maps i to sample i of a global batch: named tensors without a batch dim


@frozen
class MicroBatches:
    """Micro-batches of one data-parallel rank. The loss of those that start at `stop` or later is not counted."""

    starts: tuple[int, ...]  # the first sample of each
    size: int  # samples of each
    stop: int  # the last sample of all ranks, plus 1


@frozen
class StepResult:
    """Result of one optimizer step, equal on all ranks."""

    loss: float  # sum of weighted losses / sum of weights over the global batch; nats per token for a cross-entropy
    grad_norm: float  # before clipping
    lr: float
    skipped: bool = False  # loss or gradients were not finite, so no weight has changed
    loss_scale: float | None = None  # of fp16, after the step


@frozen
class EvaluationResult:
    """Mean loss of an evaluation, equal on all ranks."""

    loss: float  # nats per token
    tokens: int  # predicted

    @property
    def perplexity(self) -> float:
        """Return e to the power of the loss; infinity if that is too large."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


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
    scaler: SharedGradScaler | None  # of fp16
    losses: Losses
    steps: Steps
    checked: bool = field(default=False, init=False)  # samples of a first micro-batch have been checked
    weight_sum: Tensor = field(init=False)  # of the micro-batches of this step that this rank has run
    skipped: int = field(default=0, init=False)  # steps, of those done
    skipped_by_choice: int = field(default=0, init=False)  # steps that `Recipe.skip_non_finite` allowed

    @property
    def done(self) -> int:
        """Return the number of steps done, skipped ones included."""
        return int(self.scheduler.num_steps)

    @classmethod
    def build(cls, plan: Plan, model: Model, recipe: Recipe, steps: object = None) -> Engine:
        """Build this rank's model chunks, optimizer and schedule. Initial weights do not depend on the layout.

        torch.distributed must be initialized with as many ranks as the plan has. steps: an object with any of the
        methods of `Steps`. Raise UserError for a plan that the runtime does not run.
        """
        check_trainable(plan, model)
        if recipe.deterministic:
            device.use_deterministic_kernels()
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
        config.grad_scale_func = optimizer.scale_loss
        scaler = share_grad_scaler(recipe, optimizer, plan.workload.tokens) if config.fp16 else None
        scheduler = make_scheduler(recipe, optimizer)
        engine = cls(plan, g, recipe, groups, chunks, optimizer, scheduler, scaler, Losses.of(g), complete(steps))
        config.finalize_model_grads_func = engine._finalize_gradients
        if steps is not None:
            for chunk in model_chunks:
                chunk.return_predictions()
        return engine

    def step(self, samples: Samples) -> StepResult:
        """Train on one global batch. `samples(i)` is called for this rank's samples only.

        No weight changes if the loss or a gradient is NaN or infinite. The step is then skipped if the loss scale of
        fp16 can be lowered, or the recipe allows it. Else raise NonFiniteError, which names rank, layer and parameter.
        """
        self._seed_dropout()
        buffers = self._moving_buffers()
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        part = self._microbatches_of(self.plan.workload.batch, self.plan.layout.micro_batch)
        loss = mean_loss(self._run(samples, part, self.steps.training_step, forward_only=False))
        lr = self.optimizer.param_groups[0]["lr"]
        update = update_weights(self.optimizer, loss, self.recipe.clip_grad)
        if not update.done:
            for buffer, value in buffers:
                buffer.copy_(value)
            self._check_skip(samples, part, loss, update.grad_norm)
            self.skipped += 1
        if self.scaler:
            self.scaler.settle(overflow=not update.done)
        self.scheduler.step(1)
        scale = self.scaler.loss_scale if self.scaler else None
        return StepResult(loss, update.grad_norm, float(lr), not update.done, scale)

    def _moving_buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Return the expert biases, which the schedules move with the gradients, and their values."""
        named = (item for chunk in self.chunks for item in chunk.named_buffers())
        return [(b, b.clone()) for name, b in named if name.endswith("expert_bias")]

    def _check_skip(self, samples: Samples, part: MicroBatches, loss: float, norm: float) -> None:
        """Raise NonFiniteError unless this step may be skipped."""
        if self.scaler and not self.scaler.is_smallest:
            return
        self.skipped_by_choice += 1
        if self.skipped_by_choice <= self.recipe.skip_non_finite:
            return
        chunks = self.model_chunks
        first = first_bad_gradient(chunks)
        if not math.isfinite(loss):
            self._seed_dropout()
            step = self.steps.training_step
            first = first_bad_output(chunks, lambda: self._run(samples, part, step, forward_only=True)) or first
        scale = f" at the smallest loss scale, {self.scaler.loss_scale:g}" if self.scaler else ""
        raise NonFiniteError(
            f"step {self.done + 1}: loss {loss:g}, gradient norm {norm:g}{scale}: training has diverged\n"
            f"first at {first or 'the gradient norm'}"
        )

    def evaluate(self, samples: Samples, count: int) -> EvaluationResult:
        """Return the mean loss over `count` samples, any number, `samples(0)` to `samples(count - 1)`."""
        for chunk in self.chunks:
            chunk.eval()
        layout, size = self.plan.layout, self.plan.workload.batch
        whole = count - count % size
        parts = [self._microbatches_of(size, layout.micro_batch, first) for first in range(0, whole, size)]
        if count > whole:
            parts.append(self._microbatches_of(count - whole, 1, whole))
        with torch.no_grad():
            sums = [self._run(samples, part, self.steps.validation_step, forward_only=True) for part in parts]
        total = torch.stack(sums).sum(0)
        return EvaluationResult(loss=mean_loss(total), tokens=round(float(total[0, 1])))

    def _run(self, samples: Samples, part: MicroBatches, step: Step, *, forward_only: bool) -> Tensor:
        """Run micro-batches through the pipeline. Return (loss_sum, weight_sum) of all ranks.

        After them come the sums of each loss: [1 + losses, 2], float64, equal on all ranks.
        """
        whole = [self._microbatch(samples, part, start) for start in part.starts]
        counted = [batch for start, batch in zip(part.starts, whole, strict=True) if start < part.stop]
        forward_step = partial(self._forward_step, step, self._ratios(counted))
        masks = [MaskSource(self.recipe.seed, self.done, first_sample=start) for start in part.starts]
        feed = list(zip(map(self._on_this_rank, whole), masks, strict=True))
        feeds = [iter(feed) for _ in self.chunks]  # each chunk has its own iterator over all
        self.weight_sum = torch.zeros((), dtype=torch.float64, device=device.current())
        sums = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=feeds if len(feeds) > 1 else feeds[0],
            model=self.chunks if len(feeds) > 1 else self.chunks[0],
            num_microbatches=len(part.starts),
            seq_length=self._sent_positions(),
            micro_batch_size=part.size,
            forward_only=forward_only,
        )
        total = torch.zeros(1 + len(self.losses.names), 2, dtype=torch.float64, device=device.current())
        if self.groups.is_last_pipeline_rank and self.groups.tp_rank == 0:
            for start, each in zip(part.starts, sums, strict=True):
                if start < part.stop:
                    total += each["sums"]
        dist.all_reduce(total)
        return total

    def _sent_positions(self) -> int:
        """Return the positions of the hidden states between stages, of which megatron-core sends 1 / cp, or / tp · cp.

        Sequences that are not sharded, such as the patches of an image, count as often as megatron-core divides them.
        """
        layout, seq = self.plan.layout, self.plan.workload.seq
        for stage in (s for s in self.plan.stages if s.start):
            name = self.graph.live_values[stage.start][0]
            d = self.graph.nodes[self.graph.index[name]].shape.positions("embed")
            return seq if d.size is None else d.size * layout.cp * (layout.tp if layout.sequence_parallel else 1)
        return seq

    def _microbatches_of(self, samples: int, size: int, first: int = 0) -> MicroBatches:
        """Return this rank's micro-batches of a number of samples.

        Micro-batch k of data-parallel rank r is the global micro-batch k · dp + r. So the samples that share a
        micro-batch do not depend on dp. All ranks have equally many, in whole groups of an interleaved schedule: some
        may be beyond the last sample.
        """
        layout = self.plan.layout
        count = -(-samples // (size * layout.dp))
        if layout.vpp > 1:
            count += -count % layout.microbatch_group_size
        starts = (first + (k * layout.dp + self.groups.dp_rank) * size for k in range(count))
        return MicroBatches(tuple(starts), size, first + samples)

    def _microbatch(self, samples: Samples, part: MicroBatches, start: int) -> MicroBatch:
        """Return a micro-batch as whole sequences, named tensors [size ..]. Beyond the last sample, repeat that one."""
        own = [samples(min(start + j, part.stop - 1)) for j in range(part.size)]
        for sample in own if not self.checked else ():
            check_sample(self.graph, sample, self.plan.workload.seq)
        self.checked = True
        return {name: torch.stack([sample[name] for sample in own]) for name in own[0]}

    def _on_this_rank(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch on this rank's device, with its context-parallel part of each sequence."""
        out, layout = {}, self.plan.layout
        for name, x in batch.items():
            value = self.graph.nodes[self.graph.index[name]].value
            for i, d in enumerate(value.shape):
                if d.name in SEQUENCES and layout.cp > 1:
                    x = x.index_select(i, zigzag(x.shape[i], layout.cp, self.groups.cp_rank))
            x = x.to(self.chunks[0].config.params_dtype) if value.dtype is DType.COMPUTE else x
            out[name] = x.contiguous().to(device.current())
        return out

    def _ratios(self, whole: list[MicroBatch]) -> Tensor:
        """Return, for each loss, the weights of the first loss over its own, summed over the global batch."""
        names = self.losses.names
        if len(names) == 1:
            return torch.ones(1, dtype=torch.float64)
        total = sum((weight_sums(self.graph, names, batch) for batch in whole), start=torch.zeros(len(names)).double())
        total = total.to(device.current())
        dist.all_reduce(total, group=self.groups.collection.dp)
        return total[0] / total

    def _forward_step(
        self, step: Step, ratios: Tensor, feed: Iterator[tuple[MicroBatch, MaskSource]], chunk: DistributedDataParallel
    ) -> tuple[Tensor, Any]:
        """Run a micro-batch through a chunk. Return its output and the loss reduction, as the schedules ask."""
        results: list[Any] = []
        whole_batch, masks = next(feed)

        def forward(batch: MicroBatch) -> Outputs | None:
            results.append(out := chunk(**batch, masks=masks))
            if not isinstance(out, dict):
                return None
            loss_sum, weight_sum, each = self.losses.sums(out[self.losses.end], ratios)
            results.append(each)
            return Outputs(out, loss_sum, weight_sum)

        sums = step(forward, dict(whole_batch))
        if not results:
            raise UserError(f"{step.__qualname__} returned without a call of forward: call it once")
        if not isinstance(results[0], dict):
            return results[0], None
        if sums is None:
            raise UserError(f"{step.__qualname__} must return (loss_sum, weight_sum) where forward returns outputs")
        return sums[0], partial(self._reduce_loss, torch.as_tensor(sums[1]), results[1])

    def _reduce_loss(
        self, weight_sum: Tensor, each: Tensor, loss_sum: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return a micro-batch's loss sum, the number of its backward passes, and a report of its sums."""
        weight = weight_sum.detach().to(self.weight_sum)
        self.weight_sum += weight
        total = torch.stack([loss_sum.detach().to(weight), weight])
        report = torch.cat([total[None], each.to(total)])
        return loss_sum, torch.ones((), dtype=torch.int, device=report.device), {"sums": report}

    def _finalize_gradients(self, chunks: list[Any], count: Tensor | None = None, **options: Any) -> None:
        """Reduce the gradients of the step, divided by the sum of the weights of the global batch."""
        finalize_model_grads(chunks, self.weight_sum, **options)

    def _seed_dropout(self) -> None:
        """Seed the dropout of fused attention and of experts, whose masks depend on the layout, from the step number.

        So a resumed run draws the masks of an uninterrupted one. Ranks of a tensor-parallel group share the seed, hence
        the masks of replicated tensors. Masks of sharded tensors are drawn under megatron-core's RNG tracker, which
        adds the rank.
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
        state = sharded_optimizer_state(self._parameters(), self.optimizer, loading=loading)
        scale = {"loss_scale": self.scaler.state_dict()} if self.scaler else {}
        return {**state, "done": self.done, "skipped": self.skipped, **scale}

    def load_state(self, loaded: dict[str, Any]) -> None:
        """Take over weights, optimizer state and step count that were loaded into `sharded_state(loading=True)`."""
        for chunk in self.model_chunks:
            chunk.load(loaded["model"])
        self.skipped = loaded.get("skipped", 0)
        updates = loaded["done"] - self.skipped
        restore_optimizer_state(loaded, self._parameters(), self.optimizer, steps=updates)
        if self.scaler and "loss_scale" in loaded:
            self.scaler.load_state_dict(loaded["loss_scale"])
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


def mean_loss(sums: Tensor) -> float:
    """Return the loss that these sums of `Engine._run` mean."""
    return float(sums[0, 0] / sums[0, 1])
