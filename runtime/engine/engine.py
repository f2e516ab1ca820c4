"""The engine: one rank's part of the model, its optimizer, and one optimizer step through megatron-core's schedules.

A step is data step, forward step, loss reduction. The engine neither reads files nor prints; `loop` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch
from attrs import define, field
from torch import Tensor

from megaloom.dsl import Graph, Model, UserError, graph
from megaloom.planner.contract.plans import Plan
from megaloom.planner.rules.plan_check import check_trainable
from megaloom.runtime.checkpoints import checkpoint
from megaloom.runtime.checkpoints.manifest import Manifest
from megaloom.runtime.launch.agreement import agreed
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.modules.initial_weights import GivenValues, adapters_of
from megaloom.runtime.modules.model_chunk import ModelChunk
from megaloom.runtime.ops.dropout_masks import MaskSource
from megaloom.runtime.optimizer.fine_tuning import fine_tuning
from megaloom.runtime.optimizer.parameter_groups import ParameterGroup, zero_frozen_gradients
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.optimizer.weight_update import (
    NonFiniteError,
    first_bad_gradient,
    first_bad_output,
    update_weights,
)
from megaloom.runtime.reference.declared_reads import check_graph
from megaloom.runtime.samples.samples import Sample, SampleMaker

from .gradients import WeightGradient, gather_gradients
from .loss_totals import LossTerms, LossTotals
from .own_batches import (
    Batch,
    captured_logits,
    check_multiple,
    filled,
    gathered_logits,
    gathered_rows,
    global_samples,
    samples_of,
)
from .own_sums import check_counted, evaluated
from .pipeline_run import MicroBatches, PipelineRun, Samples
from .rank_model import RankModel
from .results import EvaluationResult, StepResult
from .shared_batches import SharedBatches, check_kinds, is_absent
from .steps import DECLARED, HeldOut, Step, Steps, complete, held_out_step, reads_more
from .training_state import TrainingState, restore


@define(eq=False)
class Engine:
    """This rank's part of the model under a plan, ready to train."""

    plan: Plan
    graph: Graph
    recipe: Recipe
    groups: ProcessGroups
    state: TrainingState
    pipeline: PipelineRun
    steps: Steps
    parameter_groups: tuple[ParameterGroup, ...]
    shared: SharedBatches
    saved: Path | None = field(default=None, init=False)  # the checkpoint of the last `save` or `load`
    skipped_by_choice: int = field(default=0, init=False)  # steps that `Recipe.skip_non_finite` allowed

    @property
    def done(self) -> int:
        """Return the number of steps done, skipped ones included."""
        return self.state.done

    @classmethod
    def build(
        cls,
        plan: Plan,
        model: Model,
        recipe: Recipe,
        steps: object = None,
        *,
        parameter_groups: Sequence[ParameterGroup] = (),
        average: float | None = None,
        weights: GivenValues | None = None,
    ) -> Engine:
        """Build this rank's model chunks, optimizer and schedule. Initial weights do not depend on the layout.

        torch.distributed must be initialized with as many ranks as the plan has. steps: an object with any of the
        methods of `Steps`. For the other options see `shard`. Raise UserError for a plan that the runtime does not run.
        """
        _check(plan, model, recipe)
        part = RankModel.build(plan, model, recipe.seed, weights, adapters_of(model), sharded=plan.layout.fsdp)
        recipe = recipe if weights is None else fine_tuning(recipe, model)
        shared_gradients = part.shared_gradients()
        state = TrainingState.of(part, recipe, parameter_groups, average)
        g, groups, own = part.graph, part.groups, complete(steps)
        terms, reads = LossTerms.of(g, plan.layout.cp), steps is not None and reads_more(own)
        pipeline = PipelineRun(plan, g, groups, state.chunks, terms, shared_gradients, steps is not None, reads)
        part.config.finalize_model_grads_func = pipeline.finalize_gradients
        if pipeline.own_steps or terms.classifier:
            part.return_predictions()
        shared = SharedBatches(groups, g, plan.workload.seq, pipeline.reads_more)
        return cls(plan, g, recipe, groups, state, pipeline, own, tuple(parameter_groups), shared)

    def step(self, batch: Batch | Samples | None, count: int | None = None) -> StepResult:
        """Train on one global batch.

        batch: the sequences of this data-parallel rank, named tensors [batch / dp ..] or token ids. All tp, cp and pp
        ranks of it give the same, or the first of them gives it and the others None. Or a function from i to sample i
        of the global batch, which is called for this rank's samples only, and which every rank gives; count: the
        number of samples of the global batch, if it is not the plan's.

        No weight changes if the loss or a gradient is NaN or infinite. The step is then skipped if the loss scale of
        fp16 can be lowered, or the recipe allows it. Else raise NonFiniteError, which names rank, layer and parameter.
        """
        return self._step(*self._global_batch(batch, count), gathers=False)[0]

    def step_with_gradients(self, batch: Batch | Samples | None) -> tuple[StepResult, dict[str, WeightGradient] | None]:
        """Train as `step` does. Return its result, and the gradients that `gradients` would have returned before it."""
        return self._step(*self._global_batch(batch), gathers=True)

    def _step(
        self, samples: Samples, part: MicroBatches, *, gathers: bool
    ) -> tuple[StepResult, dict[str, WeightGradient] | None]:
        """Train on a global batch. Return the result, and if asked for, on rank 0, the gradients before clipping."""
        state, buffers = self.state, self.state.moving_buffers()
        totals = self._backward(samples, part).on_host()
        gradients = self._gathered_gradients() if gathers else None
        lr = float(state.scheduler.get_lr({}))
        update = update_weights(state.optimizer, totals.loss, self.recipe.clip_grad)
        if not update.done:
            restore(buffers)
            check_counted(totals, self.steps.training_step)
            self._check_skip(samples, part, totals.loss, update.grad_norm)
        state.end_step(skipped=not update.done)
        scale = state.scaler.loss_scale if state.scaler else None
        result = StepResult(totals.loss, update.grad_norm, lr, not update.done, scale, totals.means, totals.report)
        return result, gradients

    def gradients(self, batch: Batch | Samples | None) -> dict[str, WeightGradient] | None:
        """Return the gradient of the mean loss by each trained weight on rank 0, None on other ranks.

        Every rank calls it. Names and shapes are those of `graph(model).weights`. The shards of all ranks are gathered,
        and nothing is clipped. batch: as in `step`. No weight changes; dropout is that of the next step.
        """
        buffers = self.state.moving_buffers()
        self._backward(*self._global_batch(batch))
        restore(buffers)
        return self._gathered_gradients()

    def _gathered_gradients(self) -> dict[str, WeightGradient] | None:
        """Return the gradients of the last backward pass on rank 0, None on other ranks."""
        scaler = self.state.scaler
        return gather_gradients(self.state.chunks, float(scaler.scale) if scaler else 1.0)

    def _global_batch(self, batch: Batch | Samples | None, count: int | None = None) -> tuple[Samples, MicroBatches]:
        """Return the samples of a global batch, and this rank's micro-batches of them."""
        check_kinds(batch, count)
        samples = batch
        if callable(samples):
            samples = self.shared.named(samples)
        else:
            samples = agreed(partial(self._own_samples, self.shared.of(batch, training=True)))
        return samples, self.pipeline.training_part(self.plan.workload.batch if count is None else count)

    def _backward(self, samples: Samples, part: MicroBatches) -> LossTotals:
        """Run micro-batches forward and backward, and reduce their gradients over the ranks."""
        self.state.seed_dropout(self.recipe.seed)
        self.state.set_training(True)
        self.state.zero_gradients()
        totals = self._run(samples, part, self.steps.training_step, forward_only=False)
        zero_frozen_gradients(self.model_chunks, self.parameter_groups)
        return totals

    def _check_skip(self, samples: Samples, part: MicroBatches, loss: float, norm: float) -> None:
        """Raise NonFiniteError unless this step may be skipped."""
        scaler, chunks = self.state.scaler, self.model_chunks
        if scaler and not scaler.is_smallest:
            return
        self.skipped_by_choice += 1
        if self.skipped_by_choice <= self.recipe.skip_non_finite:
            return
        first = first_bad_gradient(chunks)
        if not math.isfinite(loss):
            self.state.seed_dropout(self.recipe.seed)
            step = self.steps.training_step
            first = first_bad_output(chunks, lambda: self._run(samples, part, step, forward_only=True)) or first
        scale = f" at the smallest loss scale, {scaler.loss_scale:g}" if scaler else ""
        raise NonFiniteError(
            f"step {self.done + 1}: loss {loss:g}, gradient norm {norm:g}{scale}: training has diverged\n"
            f"first at {first or 'the gradient norm'}"
        )

    def evaluate(
        self, batches: Iterable[Batch | None] | None, *, step: HeldOut = "validation", micro_batch: int = 1
    ) -> EvaluationResult:
        """Return the mean loss over batches, each with any number of sequences.

        Each data-parallel rank gives its own batches, and they may be fewer or smaller than those of other ranks. Its
        tp, cp and pp ranks give them as in `step`. step: the one of the user's steps that runs, `validation_step` or
        `test_step`. micro_batch: sequences that it gets at a time, such as 2 for a loss of pairs; each batch has a
        multiple of them.
        """
        self.state.set_training(False)
        run = held_out_step(self.steps, step)
        total, own, last = self.pipeline.terms.zero(device.current()), iter(batches or ()), None
        while True:
            samples = agreed(partial(self._samples_of, self.shared.of(next(own, None)), micro_batch))
            part = self.pipeline.own_part(len(samples), micro_batch)
            if not part.starts:
                return evaluated(total, run)
            last = samples[-1] if samples else last
            rows = agreed(partial(filled, samples, last))
            with torch.no_grad():
                total += self._run(rows.__getitem__, part, run, forward_only=True)

    def logits(self, batch: Batch | None) -> Tensor | None:
        """Return the logits [sequences, seq, vocab] for this data-parallel rank's sequences.

        All ranks of the last pipeline stage return them, other ranks None. Every data-parallel rank gives a batch.
        """
        self.state.set_training(False)
        samples = agreed(partial(self._samples_of, self.shared.of(batch)))
        part = self.pipeline.own_part(len(samples))
        with torch.no_grad(), captured_logits(self.model_chunks) as captured:
            self._run(samples.__getitem__, part, DECLARED.validation_step, forward_only=True)
        if not self.groups.is_last_pipeline_rank:
            return None
        return gathered_logits(captured, self.graph, self.groups)[: len(samples)]

    def gathered_over_dp(self, x: Tensor | None) -> Tensor | None:
        """Return tensors [rows ..] of all data-parallel ranks, joined in the order of the ranks; rows may differ.

        Every rank calls it, and each gets those of the ranks with its tp, cp and pp index. Where they have None, such
        as logits before the last pipeline stage, the result is None. A number is a tensor [1].
        """
        return gathered_rows(x, self.groups)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights, for `evaluate` and `logits`."""
        if self.state.averages is None:
            raise UserError("this engine has no averaged weights\ngive a decay: shard(…, average=0.999)")
        return self.state.averages.in_model()

    def save(self, run: Path) -> Path:
        """Save the training state of all ranks as run/step-…, and return that folder. Every rank calls it.

        A state that was loaded from this folder or saved there, without a step since, is not saved again.
        """
        folder = run / f"step-{self.done:06d}"
        if self.saved == folder:
            return folder
        self.saved = checkpoint.save(self.state, run, self.manifest())
        return self.saved

    def manifest(self) -> Manifest:
        """Return what a checkpoint of the present state says of itself. It knows of no data."""
        return Manifest(
            step=self.done,
            samples=self.done * self.plan.workload.batch,
            model=self.plan.model,
            fingerprint=self.plan.fingerprint,
            data="",
            recipe=self.recipe.as_saved(),
            averaged=self.state.averages is not None,
            layout=str(self.plan.layout),
            workload=self.plan.workload.as_saved(),
        )

    def load(self, run: Path) -> int:
        """Load the last checkpoint of a run folder, saved under any layout, and return its step; 0 if there is none."""
        if last := checkpoint.newest_on_ranks(run, fingerprint=self.plan.fingerprint):
            self.state.loads_average = last.manifest.averaged
            checkpoint.load(self.state, last)
            self.saved = last.folder
        return self.done

    def _own_samples(self, batch: Batch | None) -> Samples:
        """Return this data-parallel rank's samples of a step, by their index in the global batch."""
        if is_absent(batch):
            raise UserError(
                f"data-parallel rank {self.groups.dp_rank} has no batch: its first rank passed None, or an empty one"
            )
        return global_samples(self._samples_of(batch), self.plan.workload, self.plan.layout)

    def _samples_of(self, batch: Batch | None, multiple: int = 1) -> list[Sample]:
        """Return the samples of a batch; None has none. Raise UserError unless they are a multiple of `multiple`."""
        if batch is None or is_absent(batch):
            return []
        seq = self.plan.workload.seq

        def data_step(text: Tensor) -> Sample:
            return self.steps.data_step(SampleMaker.of(self.graph, seq), text, self.done, self.recipe.seed)

        samples = samples_of(batch, self.graph, seq, data_step, more=self.pipeline.reads_more)
        check_multiple(samples, multiple)
        return samples

    def evaluate_samples(
        self,
        samples: Samples,
        count: int,
        *,
        step: HeldOut = "validation",
        micro_batch: int | None = None,
        stops: Callable[[int], bool] = lambda done: False,
    ) -> EvaluationResult:
        """Return the mean loss over `count` samples, any number, `samples(0)` to `samples(count - 1)`.

        micro_batch: samples per micro-batch; None for that of training. stops: called on every rank after each batch,
        with the number of samples that are done. Where it returns True, which all ranks must agree on, the evaluation
        ends, and the result is the mean until there.
        """
        self.state.set_training(False)
        size, micro_batch = self.plan.workload.batch, micro_batch or self.plan.layout.micro_batch
        with torch.no_grad():
            total = self.pipeline.terms.zero(device.current())
            for first in range(0, count, size):
                stop = min(first + size, count)
                ones = first + (size - size % micro_batch if stop - first == size else 0)  # from here on, one by one
                for start, end, each in ((first, ones, micro_batch), (ones, stop, 1)):
                    if start < end:
                        part = self.pipeline.evaluation_part(end - start, each, start)
                        total += self._run(samples, part, held_out_step(self.steps, step), forward_only=True)
                if stops(stop):
                    break
        return total.on_host().evaluation

    def _run(self, samples: Samples, part: MicroBatches, step: Step, *, forward_only: bool) -> LossTotals:
        """Run micro-batches through the pipeline, with the dropout of this step."""
        masks = MaskSource(self.recipe.seed, self.done, first_sample=0)
        return self.pipeline.run(samples, part, step, masks, forward_only=forward_only)

    @property
    def model_chunks(self) -> list[ModelChunk]:
        """Return this rank's model chunks, without their DDP wrappers."""
        return self.state.model_chunks


def _check(plan: Plan, model: Model, recipe: Recipe) -> None:
    """Raise UserError unless the runtime trains the model under a plan with this recipe."""
    check_trainable(plan, model)
    check_graph(graph(model))
    recipe.check_layout(plan.layout)
    if recipe.deterministic:
        device.use_deterministic_kernels()
    if not any(slot.trained for slot in graph(model).weights.values()):
        raise UserError(
            f"all weights of {model.name} are frozen, so there is nothing to train\n"
            "train it without freeze(…); shard_frozen(…) runs a frozen model beside another one"
        )
