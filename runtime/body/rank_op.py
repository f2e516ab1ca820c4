"""A primitive on this rank, with the collectives and random numbers of megatron-core."""

from __future__ import annotations

import torch.nn.functional as F
from attrs import frozen
from megatron.core import tensor_parallel
from torch import Tensor

from megaloom.dsl.facts.placement import Transition
from megaloom.runtime.megatron.recompute import recomputed
from megaloom.runtime.ops.local_op import LocalOp, TensorFunction

from .transitions import perform


@frozen(eq=False)
class RankOp(LocalOp):
    """A primitive on this rank."""

    def perform(self, transition: Transition, x: Tensor) -> Tensor:
        return perform(transition, x, None, self.groups)

    def exchange_over_ep(self, x: Tensor) -> Tensor:
        out: Tensor = tensor_parallel.all_to_all(self.groups.collection.ep, x.contiguous())
        return out

    def recomputed(self, function: TensorFunction, *args: Tensor) -> Tensor:
        return recomputed(function, *args)

    def drop_apart(self, x: Tensor, rate: float) -> Tensor:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return F.dropout(x, rate)

    def overwriting_cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        out: Tensor = tensor_parallel.vocab_parallel_cross_entropy(logits, labels)
        return out
