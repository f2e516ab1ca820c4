"""One pass of a batch through the pipeline, by megatron-core's schedules: micro-batches in, totals of the losses out.

`PipelineRun.run` takes samples by their index, splits them into micro-batches and each sequence over the
context-parallel ranks, and runs the user's step on each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, evolve, field, frozen
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megaloom.dsl import DType, Graph, UserError
from megaloom.dsl.sharding_table import SEQUENCES
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.body.balancing_loss import Balancing
from megaloom.runtime.body.corrections import move_corrections
from megaloom.runtime.launch.agreement import agreed, largest
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.kernels import zigzag_part
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.megatron.stage_communicator import StageCommunicator
from megaloom.runtime.modules.engine import cast_weights_anew
from megaloom.runtime.modules.model_chunk import ModelChunk
from megaloom.runtime.modules.shared_weights import SharedGradients
from megaloom.runtime.modules.stage_boundary import StageBoundary
from megaloom.runtime.ops.dropout_masks import MaskSource
from megaloom.runtime.samples.sample_checks import check_sample, stacked
from megaloom.runtime.samples.samples import Sample

from .loss_totals import LossTerms, LossTotals
from .loss_weights import weight_sums
from .outputs import LocalOutputs, Outputs, over_cp
from .own_sums import StepSums, check_equal_sums, check_names, common_names
from .steps import MicroBatch, Step

INSIDE: ContextVar[bool] = ContextVar("inside", default=False)  # whether this rank runs micro-batches at present
Samples = Callable[[int], Sample]  # maps i to sample i of a global batch: named tensors without a batch dim


@frozen
class MicroBatches:
    """Micro-batches of one data-parallel rank. The loss of those that start at `stop` or later is not counted."""

    starts: tuple[int, ...]  # the first sample of each
    size: int  # samples of each
    stop: int  # the last sample of all ranks, plus 1


@define(eq=False)
class PipelineRun:
    """The pipeline of this rank: its model chunks, and what the schedules need to run them."""

    plan: Plan
    graph: Graph
    groups: ProcessGroups
    chunks: list[Any]  # in DDP, sharded, or of a frozen model
    terms: LossTerms
    shared_gradients: SharedGradients
    own_steps: bool = False  # steps of the user's own, which return sums over whole sequences
    reads_more: bool = False  # these steps may read tensors beside the inputs of the model
    checked: bool = field(default=False, init=False)  # samples of a first micro-batch have been checked
    weight_sum: Tensor = field(init=False)  # of the micro-batches of this pass that this rank has run
    returned: list[StepSums] = field(init=False)  # by the step, for each of them
    reported: dict[Step, tuple[str, ...]] = field(factory=dict, init=False)  # names of the report of each own step

    def own_part(self, count: int, size: int = 1) -> MicroBatches:
        """Return micro-batches of `size` for this rank's own samples, on each rank as many as the most."""
        layout, (most,) = self.plan.layout, largest(-(-count // size))
        if layout.vpp > 1:
            most += -most % layout.microbatch_group_size
        return MicroBatches(tuple(range(0, most * size, size)), size, count)

    def run(
        self, samples: Samples, part: MicroBatches, step: Step, masks: MaskSource, *, forward_only: bool
    ) -> LossTotals:
        """Run micro-batches through the pipeline. Return the totals of their losses, equal on all ranks.

        masks: of dropout. Losses that balance experts over the batch need the load of all micro-batches before the
        first backward pass, so a forward pass of all comes first.
        """
        whole = agreed(lambda: [self._microbatch(samples, part, start) for start in part.starts])
        weights = self._weights([b for start, b in zip(part.starts, whole, strict=True) if start < part.stop])
        frequencies: dict[str, Tensor] = {}
        if self.terms.over_batch and not forward_only:
            with torch.no_grad():
                frequencies = self._pass(whole, part, step, masks, weights, {}, forward_only=True).frequencies
        return self._pass(whole, part, step, masks, weights, frequencies, forward_only=forward_only)

    def _pass(
        self,
        whole: list[MicroBatch],
        part: MicroBatches,
        step: Step,
        masks: MaskSource,
        weights: Tensor,
        frequencies: dict[str, Tensor],
        *,
        forward_only: bool,
    ) -> LossTotals:
        """Run these micro-batches, of whole sequences. weights: of `_weights`. frequencies: of experts, see `run`."""
        *of_losses, sequences = weights.tolist()
        factors = self.terms.losses.factors(weights[:-1]).to(device.current(), non_blocking=True)
        forward_step = partial(self._forward_step, step, factors, scored=forward_only)
        balancing = [Balancing(of_losses[0] / sequences, frequencies) for _ in whole]
        feed = [
            (self._on_device(batch), {"masks": evolve(masks, first_sample=start), "balancing": losses})
            for start, batch, losses in zip(part.starts, whole, balancing, strict=True)
        ]
        feeds = [iter(feed) for _ in self.chunks]  # each chunk has its own iterator over all
        self.weight_sum = torch.zeros((), dtype=torch.float64, device=device.current())
        self.returned = []
        cast_weights_anew(self.chunks)
        with _inside():
            sums = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=feeds if len(feeds) > 1 else feeds[0],
                model=self.chunks if len(feeds) > 1 else self.chunks[0],
                num_microbatches=len(part.starts),
                seq_length=self.plan.workload.seq,
                micro_batch_size=part.size,
                forward_only=forward_only,
                **self._sends(part),
            )
        if self.reads_more and step not in self.reported:
            self.reported[step] = common_names(step, self.returned)
        if self.own_steps:
            check_equal_sums(step, self.returned, self.groups)
        return self._totals(part, sums, [losses.records for losses in balancing], self.reported.get(step, ()))

    def _totals(
        self,
        part: MicroBatches,
        reports: list[dict[str, Tensor]],
        records: list[dict[str, Tensor]],
        names: tuple[str, ...],
    ) -> LossTotals:
        """Return the totals of all ranks.

        reports: of each micro-batch on the last stage, its `sums` [1 + losses, 2], its `counts`, and `own`, the report
        of the user's step [names, 2]. records: of mixtures, for each micro-batch.
        """
        total, groups = self.terms.zero(device.current(), names), self.groups
        for i, start in enumerate(part.starts):
            if start < part.stop:
                total.add_records(records[i])
                if groups.is_last_pipeline_rank and groups.tp_rank == 0:
                    total.add_losses(reports[i]["sums"])
                    total.add_sequences(part.size if groups.cp_rank == 0 else 0)
                    if "counts" in reports[i] and groups.cp_rank == 0:
                        total.add_counts(reports[i]["counts"])
                    if groups.cp_rank == 0:
                        total.add_report(reports[i]["own"])
        dist.all_reduce(total.sums)
        return total

    def _sends(self, part: MicroBatches) -> dict[str, Any]:
        """Return what the schedules send between stages by: a communicator that knows the size of each tensor."""
        layout, seq = self.plan.layout, self.plan.workload.seq
        if layout.pp == 1:
            return {}
        starts = (*(s.start for s in self.plan.stages), self.plan.stages[-1].stop)
        boundaries = (StageBoundary.of(self.graph, node, layout.split, seq) for node in starts)
        elements = [part.size * sum(boundary.elements) for boundary in boundaries]
        communicator = StageCommunicator(self.groups, self.chunks[0].config, elements, len(part.starts))
        return {"p2p_communicator": communicator, "pg_collection": self.groups.collection}

    def training_part(self, samples: int) -> MicroBatches:
        """Return this rank's micro-batches of a training step. All run backward, so each must be whole.

        An interleaved schedule runs them in groups, of which the last may be smaller. Raise UserError if some samples
        are left over, or a group has fewer micro-batches than there are pipeline ranks.
        """
        layout = self.plan.layout
        unit, group = layout.micro_batch * layout.dp, layout.microbatch_group_size
        if samples < 1 or samples % unit:
            raise UserError(
                f"a step of {samples} sequences is not a multiple of dp {layout.dp} x micro-batch {layout.micro_batch} "
                f"= {unit}\ntrain on a multiple of {unit}"
            )
        count = samples // unit
        if layout.vpp > 1 and (count < group or 0 < count % group < layout.pp):
            raise UserError(
                f"{count} micro-batches in groups of {group} leave a group smaller than pp {layout.pp}\n"
                f"train on a multiple of {unit * group} sequences"
            )
        return self._microbatches(count, layout.micro_batch, 0, samples)

    def evaluation_part(self, samples: int, size: int, first: int = 0) -> MicroBatches:
        """Return this rank's micro-batches of an evaluation of any number of samples.

        All ranks have equally many, in whole groups of an interleaved schedule. Those beyond the last sample are
        padding, whose loss is not counted.
        """
        layout = self.plan.layout
        count = -(-samples // (size * layout.dp))
        if layout.vpp > 1:
            count += -count % layout.microbatch_group_size
        return self._microbatches(count, size, first, first + samples)

    def _microbatches(self, count: int, size: int, first: int, stop: int) -> MicroBatches:
        """Return `count` micro-batches of this rank.

        Micro-batch k of data-parallel rank r is the global micro-batch k · dp + r. So the samples that share a
        micro-batch do not depend on dp.
        """
        dp, rank = self.plan.layout.dp, self.groups.dp_rank
        return MicroBatches(tuple(first + (k * dp + rank) * size for k in range(count)), size, stop)

    def _microbatch(self, samples: Samples, part: MicroBatches, start: int) -> MicroBatch:
        """Return a micro-batch as whole sequences, named tensors [size ..]. Beyond the last sample, repeat that one."""
        own = [samples(min(start + j, part.stop - 1)) for j in range(part.size)]
        for sample in own if not self.checked else ():
            check_sample(self.graph, sample, self.plan.workload.seq, more=self.reads_more)
        self.checked = True
        return stacked(own)

    def _on_device(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch on this rank's device, as whole sequences."""
        inputs = {n.name: n.value.dtype for n in self.graph.nodes if n.is_input}
        dtype = self.chunks[0].config.params_dtype
        computed = (x.to(dtype) if inputs.get(name) is DType.COMPUTE else x for name, x in batch.items())
        target = device.current()
        return {name: x.contiguous().to(target, non_blocking=True) for name, x in zip(batch, computed, strict=True)}

    def _on_this_rank(self, batch: MicroBatch) -> MicroBatch:
        """Return the inputs of the model in a micro-batch: of each sequence, this rank's context-parallel part."""
        out, cp = {}, self.plan.layout.cp
        for node in (n for n in self.graph.nodes if n.is_input):
            if node.name not in batch:
                raise UserError(f"forward was called without {node.name}: give it the whole batch")
            x = batch[node.name]
            for i, d in enumerate(node.shape):
                x = zigzag_part(x, i, cp, self.groups.cp_rank) if d.name in SEQUENCES else x
            out[node.name] = x.contiguous()
        return out

    def _weights(self, whole: list[MicroBatch]) -> Tensor:
        """Return the sum of the weights of each loss over the global batch, then its sequences: float64 [losses + 1].

        A model with one loss and no balancing loss needs none of them; they are 1.
        """
        names = self.terms.losses.names
        if len(names) == 1 and not self.terms.balanced:
            return torch.ones(2, dtype=torch.float64)
        total = torch.zeros(len(names) + 1, dtype=torch.float64)
        for batch in whole:
            total[:-1] += weight_sums(self.graph, names, batch)
            total[-1] += len(next(iter(batch.values())))
        if self.plan.layout.dp == 1:
            return total
        total = total.to(device.current())
        dist.all_reduce(total, group=self.groups.collection.dp)
        return total

    def _forward_step(
        self,
        step: Step,
        factors: Tensor,
        feed: Iterator[tuple[MicroBatch, dict[str, Any]]],
        chunk: DistributedDataParallel | ModelChunk,
        *,
        scored: bool,
    ) -> tuple[Tensor, Any]:
        """Run a micro-batch through a chunk. Return its output and the loss reduction, as the schedules ask.

        scored: count the classes that a classifier predicts.
        """
        results: list[Any] = []
        whole_batch, options = next(feed)

        def forward(batch: MicroBatch) -> Outputs | None:
            results.append(out := chunk(**self._on_this_rank(batch), **options))
            if not isinstance(out, dict):
                return None
            outputs, each = self._outputs(out, factors)
            report = {"sums": each}
            if scored and (classifier := self.terms.classifier):
                report["counts"] = classifier.counts(outputs.gathered(classifier.logits), batch)
            results.append(report)
            return outputs

        value = step(forward, dict(whole_batch))
        if not results:
            raise UserError(f"{step.__qualname__} returned without a call of forward: call it once")
        if not isinstance(results[0], dict):
            return results[0], None
        returned = StepSums.of(step, value, self.weight_sum.device)
        check_names(step, returned.names, self.reported.get(step, (self.returned or [returned])[0].names))
        self.returned.append(evolve(returned, loss_sum=returned.loss_sum.detach()))  # else its graph stays
        loss_sum = returned.loss_sum.clone()  # the schedules free it, which they refuse for a view
        return loss_sum, partial(self._reduce_loss, returned.sums, results[1])

    def _outputs(self, out: dict[str, Tensor], factors: Tensor) -> tuple[Outputs, Tensor]:
        """Return what a step sees of the last stage's outputs, and a report of each declared loss, [1 + losses, 2].

        The sums of steps of the user's own are over whole sequences; else each context-parallel rank has its part.
        """
        losses = self.terms.losses
        loss_sum, weight_sum, each = losses.sums(out[losses.end], factors)
        if self.own_steps:
            loss_sum, weight_sum = over_cp(torch.stack([loss_sum, weight_sum]), self.groups)
        return Outputs(LocalOutputs(out, self.graph, self.groups, losses), loss_sum, weight_sum.detach()), each

    def _reduce_loss(
        self, returned: Tensor, report: dict[str, Tensor], loss_sum: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return a micro-batch's loss sum, the number of its backward passes, and a report of its sums.

        returned: of `StepSums.sums`.
        """
        total, own = returned[0], returned[1:]
        if self.own_steps and self.groups.cp_rank > 0:
            total = torch.zeros_like(total)  # the sums are over whole sequences, on each context-parallel rank
        self.weight_sum += total[1]
        sums = torch.cat([total[None], report["sums"].to(total)])
        return loss_sum, torch.ones((), dtype=torch.int, device=sums.device), {**report, "sums": sums, "own": own}

    def finalize_gradients(self, chunks: list[Any], count: Tensor | None = None, **options: Any) -> None:
        """Reduce the gradients of the step, divided by the sum of the weights of the global batch.

        Corrections of router scores move with them, unless weights are frozen.
        """
        for chunk in chunks:
            reduce_unreached(chunk)
        finalize_model_grads(chunks, self.weight_sum, **options)
        self.shared_gradients.sum()
        if not any(s.frozen for s in self.graph.weights.values()):
            rate = chunks[0].config.moe_router_bias_update_rate  # the recipe's
            move_corrections(chunks, self.groups.collection.tp_dp_cp, rate)


@contextmanager
def _inside() -> Iterator[None]:
    """Let `INSIDE` be True in the context."""
    before = INSIDE.set(True)
    try:
        yield
    finally:
        INSIDE.reset(before)


def reduce_unreached(chunk: DistributedDataParallel) -> None:
    """Let the buckets be reduced whose gradients wait for parameters that the loss does not reach. They stay zero."""
    if chunk.ddp_config.overlap_grad_reduce:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            for p in group.params - group.per_param_grad_ready_counts.keys():
                group.register_grad_ready(p)
