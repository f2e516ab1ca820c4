"""Averaged weights: an exponential moving average of the master weights, for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from attrs import define
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch import Tensor

from megaloom.runtime.megatron.optimizer_state import optimizers_of, parameter_states

from .optimizer import TrainedChunk, gather_weights


@define(eq=False)
class AveragedWeights:
    """The average of each master weight that this rank holds, fp32. Each step moves it by 1 - decay to the weight."""

    decay: float
    optimizer: MegatronOptimizer
    chunks: list[TrainedChunk]
    values: dict[int, Tensor]  # by identity of the master weight

    @classmethod
    def of(cls, optimizer: MegatronOptimizer, chunks: list[TrainedChunk], decay: float) -> AveragedWeights:
        """Return averages that start at the present weights."""
        masters = _masters(optimizer)
        return cls(decay, optimizer, chunks, {id(master): master.detach().clone() for master in masters})

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the present weights."""
        for master in _masters(self.optimizer):
            self.values[id(master)].lerp_(master, 1 - self.decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Set the averages to the present weights."""
        for master in _masters(self.optimizer):
            self.values[id(master)].copy_(master)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Give the model the averages instead of its weights inside the context. Every rank enters it."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange master weights and averages, and copy the master weights to the model."""
        gather_weights(self.chunks)
        for master in _masters(self.optimizer):
            average = self.values[id(master)]
            weight = master.clone()
            master.copy_(average)
            average.copy_(weight)
        for one in optimizers_of(self.optimizer):
            if not one.is_stub_optimizer and not isinstance(one, FP32Optimizer):
                one._copy_main_params_to_model_params()
        gather_weights(self.chunks)


def _masters(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Return the master weights that this rank holds, whole or sharded."""
    return [state.tensors[0] for state in parameter_states(optimizer) if state.tensors]
