"""Collectives that are broken on purpose, one at a time, to see that verification finds each and names the weights.

Each entry patches megatron-core or the runtime inside a rank, before the engine is built. All ranks skip the same
collective, so none waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from functools import wraps
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from attrs import frozen

from megaloom.dsl import Graph, MoE
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.module_kinds import runs_as_module
from megaloom.planner.rules.shared_weights import shared_weight_users

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

    @wraps(linear)  # with its attribute `warned`
    def without(*args: Any, **options: Any) -> Any:
        return linear(*args, **{**options, "allreduce_dgrad": False})

    with patch.object(layers, "linear_with_grad_accumulation_and_async_allreduce", without):
        yield


@contextmanager
def sequence_parallel_gradients() -> Iterator[None]:
    """Leave the gradients of replicated parameters, which each tensor-parallel rank has for its tokens, unsummed."""
    finalize_model_grads = import_module("megatron.core.distributed.finalize_model_grads")
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
    from megaloom.runtime.modules.shared_weights import SharedGradients

    with patch.object(SharedGradients, "sum", _nothing):
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

    only_max = SimpleNamespace(all_reduce=all_reduce, ReduceOp=dist.ReduceOp)
    theirs = import_module("megatron.core.tensor_parallel.cross_entropy")
    with patch.object(fused_loss, "dist", only_max), patch.object(theirs, "torch", _Torch(only_max)):
        yield


class _Torch:
    """torch with another `torch.distributed`."""

    def __init__(self, distributed: Any) -> None:
        self.distributed = distributed

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


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


@frozen
class Traits:
    """Layout and graph of a case, which decide the collectives that it uses."""

    layout: Layout
    graph: Graph

    @property
    def mixtures(self) -> list[MoE]:
        """Return the mixtures of experts that run as megatron-core's modules."""
        return [n.op for n in self.graph.nodes if isinstance(n.op, MoE) and runs_as_module(n, self.layout.split)]


@frozen
class Broken:
    """A collective that can be broken."""

    breaks: Break
    used: Callable[[Layout, Traits], bool]  # by a case
    found: tuple[str, ...]  # patterns of the weights that must be reported; key biases have gradients of noise only
    spared: tuple[str, ...] = ()  # patterns of the weights that must not be reported, unless they must

    def mistakes(self, trained: Iterable[str], reported: Iterable[str]) -> list[str]:
        """Return what is wrong with a report that names these weights."""
        reported = set(reported)
        due = {name for name in trained if _matches(name, self.found) and not name.endswith("k_bias")}
        spared = {name for name in reported - due if _matches(name, self.spared)}
        missing = [f"{name} is not reported" for name in sorted(due - reported)]
        none = [] if due else ["no weight has a name that this collective should break"]
        return none + missing + [f"{name} is reported, although it is right" for name in sorted(spared)]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


NORMS = ("rms_norm.*", "layer_norm.*")  # of hidden states; those of queries and keys are named after their layer
EXPERTS = ("*.experts.*",)

BROKEN: dict[str, Broken] = {
    "sums of row-parallel layers": Broken(
        row_parallel_sums, lambda x, t: x.tp > 1 and not x.sequence_parallel, ("wte", *NORMS)
    ),
    "input gradients of column-parallel layers": Broken(
        column_parallel_input_gradients, lambda x, t: x.tp > 1 and not x.sequence_parallel, ("wte", *NORMS)
    ),
    "gradients of replicated parameters under sequence parallelism": Broken(
        sequence_parallel_gradients, lambda x, t: bool(x.sequence_parallel), NORMS, ("*.q", "*.o", "*.up", "*.down")
    ),
    "gradients over context-parallel ranks": Broken(
        context_parallel_gradients, lambda x, t: x.cp > 1 and x.dp == 1, ("wte", *NORMS), EXPERTS
    ),
    "scaling of gradients over data-parallel ranks": Broken(gradient_scaling, lambda x, t: x.dp > 1, NORMS),
    "gradients of a tied table on two stages": Broken(
        tied_gradients, lambda x, t: x.pp > 1 and list(shared_weight_users(t.graph)) == ["wte"], ("wte",), ("*",)
    ),
    "gradients of experts over their replicas": Broken(
        expert_gradients,
        lambda x, t: bool(t.mixtures) and x.tp * x.cp * x.dp > x.ep * x.etp,
        EXPERTS,
        ("*",),
    ),
    "order of tokens after the all-to-all of experts": Broken(
        expert_order, lambda x, t: x.ep > 1 and any(m.experts > x.ep for m in t.mixtures), EXPERTS
    ),
    "sums over a sharded vocabulary": Broken(
        vocabulary_sums,
        lambda x, t: x.tp > 1 and x.vocab_multiple < 64,  # more than one rank has tokens
        NORMS,
    ),
    "counts of the balancing loss": Broken(
        balancing_counts,
        lambda x, t: x.tp * x.cp > 1 and any(m.balance for m in t.mixtures),
        ("*.router",),
        ("head",),
    ),
    "order of sends between model chunks": Broken(send_order, lambda x, t: x.vpp > 1, ("wte",)),
}


def uses(layout: Layout, graph: Graph, broken: str) -> bool:
    """Return whether a layout of a model uses a collective."""
    return BROKEN[broken].used(layout, Traits(layout, graph))
