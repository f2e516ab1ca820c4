"""Collectives that are broken on purpose, one at a time, to see that verification finds each and names the weights.

Each entry patches megatron-core or the runtime inside a rank, before the engine is built. All ranks skip the same
collective, so none waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from attrs import frozen

from megaloom.dsl import Graph, MoE
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.module_kinds import runs_as_module
from megaloom.planner.rules.export_rules import shared_weight_users

Break = Callable[[], AbstractContextManager[Any]]


@contextmanager
def row_parallel_sums() -> Iterator[None]:
    """Leave the partial outputs of row-parallel layers unsummed."""
    from megatron.core.tensor_parallel import layers

    with patch.object(layers, "reduce_from_tensor_model_parallel_region", lambda x, group=None: x):
        yield


@contextmanager
def column_parallel_input_gradients() -> Iterator[None]:
    """Leave the input gradients of column-parallel layers unsummed."""
    from megatron.core.tensor_parallel import layers

    linear = layers.linear_with_grad_accumulation_and_async_allreduce

    def without(*args: Any, **options: Any) -> Any:
        return linear(*args, **{**options, "allreduce_dgrad": False})

    with patch.object(layers, "linear_with_grad_accumulation_and_async_allreduce", without):
        yield


@contextmanager
def sequence_parallel_gradients() -> Iterator[None]:
    """Leave the gradients of replicated parameters, which each tensor-parallel rank has for its tokens, unsummed."""
    from megatron.core.distributed import finalize_model_grads

    with patch.object(finalize_model_grads, "_allreduce_non_tensor_model_parallel_grads", _nothing):
        yield


def _nothing(*args: Any, **options: Any) -> None:
    """Stand for a collective that is skipped."""


@contextmanager
def _unreduced(of_experts: bool) -> Iterator[None]:
    """Skip the reduction of gradients over data-parallel and context-parallel ranks, of experts or of all others."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as BucketGroup

    def skipping(method: Any) -> Any:
        def wrapper(self: Any, *args: Any, **options: Any) -> None:
            experts = any(not getattr(p, "allreduce", True) for p in self.params)
            if experts is not of_experts:
                method(self, *args, **options)

        return wrapper

    with (
        patch.object(BucketGroup, "start_grad_sync", skipping(BucketGroup.start_grad_sync)),
        patch.object(BucketGroup, "finish_grad_sync", skipping(BucketGroup.finish_grad_sync)),
    ):
        yield


def context_parallel_gradients() -> AbstractContextManager[None]:
    """Leave the gradients of context-parallel ranks unsummed."""
    return _unreduced(of_experts=False)


def expert_gradients() -> AbstractContextManager[None]:
    """Leave the gradients of the ranks that hold one expert unsummed."""
    return _unreduced(of_experts=True)


@contextmanager
def gradient_scaling() -> Iterator[None]:
    """Divide gradients by the number of data-parallel ranks, as if their mean were due, not their sum."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel

    scale = DistributedDataParallel.scale_gradients

    def twice(self: Any, factor: Any) -> None:
        scale(self, factor / parallel_state.get_data_parallel_world_size())

    with patch.object(DistributedDataParallel, "scale_gradients", twice):
        yield


@contextmanager
def tied_gradients() -> Iterator[None]:
    """Leave the gradients of the tied table on the first and the last stage apart."""
    from megatron.core.distributed import finalize_model_grads

    with patch.object(finalize_model_grads, "_allreduce_word_embedding_grads", _nothing):
        yield


@contextmanager
def expert_order() -> Iterator[None]:
    """Leave the tokens that an expert-parallel rank receives sorted by sender, not by expert."""
    from megatron.core.transformer.moe import token_dispatcher

    def unsorted(x: Any, sizes: Any, order: Any, probs: Any = None, fused: bool = False) -> Any:
        return x, probs

    with patch.object(token_dispatcher, "sort_chunks_by_idxs", unsorted):
        yield


@contextmanager
def vocabulary_sums() -> Iterator[None]:
    """Leave the sums of exponentials over the shards of the vocabulary apart."""
    from megaloom.runtime.megatron import fused_loss

    def all_reduce(x: Any, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if op == dist.ReduceOp.MAX:
            dist.all_reduce(x, op, group)

    with patch.object(fused_loss, "dist", SimpleNamespace(all_reduce=all_reduce, ReduceOp=dist.ReduceOp)):
        yield


@contextmanager
def balancing_counts() -> Iterator[None]:
    """Leave the numbers of tokens of each expert, which the balancing loss reads, on each rank by themselves."""
    from megaloom.runtime.body import balancing_loss

    with patch.object(balancing_loss, "dist", SimpleNamespace(all_reduce=_nothing)):
        yield


@contextmanager
def send_order() -> Iterator[None]:
    """Send in place of each hidden state the one sent before."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    communicate = P2PCommunicator._communicate

    def late(self: Any, *, tensor_send_next: Any, **options: Any) -> Any:
        if tensor_send_next is not None:
            own = tensor_send_next.detach().clone()
            tensor_send_next, self.held = getattr(self, "held", own), own
        return communicate(self, tensor_send_next=tensor_send_next, **options)

    with patch.object(P2PCommunicator, "_communicate", late):
        yield


BROKEN: dict[str, Break] = {
    "": nullcontext,
    "sums of row-parallel layers": row_parallel_sums,
    "input gradients of column-parallel layers": column_parallel_input_gradients,
    "gradients of replicated parameters under sequence parallelism": sequence_parallel_gradients,
    "gradients over context-parallel ranks": context_parallel_gradients,
    "scaling of gradients over data-parallel ranks": gradient_scaling,
    "gradients of a tied table on two stages": tied_gradients,
    "gradients of experts over their replicas": expert_gradients,
    "order of tokens after the all-to-all of experts": expert_order,
    "sums over a sharded vocabulary": vocabulary_sums,
    "counts of the balancing loss": balancing_counts,
    "order of sends between model chunks": send_order,
}


@frozen
class Traits:
    """What decides which collectives a case uses."""

    layout: Layout
    graph: Graph

    @property
    def mixtures(self) -> list[MoE]:
        """Return the mixtures of experts that run as megatron-core's modules."""
        return [n.op for n in self.graph.nodes if isinstance(n.op, MoE) and runs_as_module(n, self.layout.split)]

    def uses(self, broken: str) -> bool:
        """Return whether the layout of this model uses a collective."""
        x, mixtures = self.layout, self.mixtures
        replicas = x.tp * x.cp * x.dp // (x.ep * x.etp)
        uses = {
            "sums of row-parallel layers": x.tp > 1 and not x.sequence_parallel,
            "input gradients of column-parallel layers": x.tp > 1 and not x.sequence_parallel,
            "gradients of replicated parameters under sequence parallelism": x.sequence_parallel,
            "gradients over context-parallel ranks": x.cp > 1 and x.dp == 1,
            "scaling of gradients over data-parallel ranks": x.dp > 1,
            "gradients of a tied table on two stages": x.pp > 1 and bool(shared_weight_users(self.graph)),
            "gradients of experts over their replicas": bool(mixtures) and replicas > 1,
            "order of tokens after the all-to-all of experts": x.ep > 1 and any(m.experts > x.ep for m in mixtures),
            "sums over a sharded vocabulary": x.tp > 1,
            "counts of the balancing loss": x.tp * x.cp > 1 and any(m.balance for m in mixtures),
            "order of sends between model chunks": x.vpp > 1,
        }
        return uses[broken]
