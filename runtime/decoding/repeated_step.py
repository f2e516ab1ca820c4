"""A decoding step that is repeated on equal tensors: on a GPU as a CUDA graph, whose kernels need no more host time.

A graph is captured after a few steps, if they did not wait for the GPU: what depends on numbers that the host reads,
such as the size of the busiest expert, cannot be repeated. The step must write its state in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from attrs import define
from torch import Tensor

from megaloom.runtime.megatron import device

STEPS_BEFORE = 3
"""Steps before a graph is captured; beams that are reordered after each step never have one."""


@define(eq=False)
class RepeatedStep:
    """Runs a step, or the graph of it."""

    steps: int = 0
    waits: bool = False  # True if the step waits for the GPU
    graph: torch.cuda.CUDAGraph | None = None
    tokens: Tensor | None = None  # that the graph reads
    result: Tensor | None = None  # that the graph writes

    def run(self, step: Callable[[Tensor], Tensor | None], tokens: Tensor) -> Tensor | None:
        """Return the result for these tokens. The next call may overwrite it."""
        if self.graph is None:
            if not device.gpu_count() or dist.get_world_size() > 1 or self.waits:
                return step(tokens)
            self.steps += 1
            if self.steps <= STEPS_BEFORE:
                return self._observed(step, tokens)
            self.graph, self.tokens = torch.cuda.CUDAGraph(), tokens.clone()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.result = step(self.tokens)
        assert self.tokens is not None, "a graph has tokens"
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.result

    def _observed(self, step: Callable[[Tensor], Tensor | None], tokens: Tensor) -> Tensor | None:
        """Return the result of a step, and note whether it waited. Earlier steps may wait, to fill caches."""
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn" if self.steps == STEPS_BEFORE else "default")
            try:
                return step(tokens)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                self.waits = any("synchronizing CUDA operation" in str(w.message) for w in found)
