"""The state of a batch in decoding: KV caches and other states of ops, and the lengths of the rows.

A step that is repeated on equal tensors becomes a CUDA graph, whose kernels need no more host time. A graph is captured
after a few steps, if they did not wait for the GPU: what depends on numbers that the host reads, such as the size of
the busiest expert, cannot be repeated. The step must write its state in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attrs import define, evolve, field, frozen
from torch import Tensor

from megaloom.runtime.megatron import device
from megaloom.runtime.ops.kv_cache import KVCache, OpState, Rows

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


@frozen(eq=False)
class EncoderCache:
    """A tensor that no written token changes, such as the keys of an encoder's output.

    rows: the index of its batch dim; None if it has none. source: that of an encoder's positions, if it has any.
    """

    values: Tensor
    rows: int | None
    source: int | None

    def select(self, rows: Tensor) -> EncoderCache:
        """Return the values of these rows."""
        return self if self.rows is None else evolve(self, values=self.values.index_select(self.rows, rows))

    def merge(self, others: Sequence[EncoderCache]) -> EncoderCache:
        """Return the values of several batches, zeros after those of shorter sources."""
        if self.rows is None:
            return self
        parts = [self.values, *(x.values for x in others)]
        if self.source is not None:
            most = max(x.shape[self.source] for x in parts)
            parts = [_extended(x, self.source, most) for x in parts]
        return evolve(self, values=torch.cat(parts, self.rows))


def _extended(x: Tensor, dim: int, size: int) -> Tensor:
    """Return a tensor with zeros at the end of a dim, up to this size."""
    return F.pad(x, (*(0, 0) * (x.ndim - 1 - dim), 0, size - x.shape[dim]))


@define(eq=False)
class DecodingState:
    """The state of a batch on this rank. columns: of the longest row, before the first step."""

    rows: Rows
    columns: int
    caches: dict[tuple[str, object], OpState] = field(factory=dict)  # by node and op
    repeated: RepeatedStep = field(factory=RepeatedStep)

    def begin_step(self) -> None:
        """Reserve memory for one more position of each row."""
        grown = [x.begin_column() for x in self.caches.values() if isinstance(x, KVCache)]
        if any(grown):
            self.repeated = RepeatedStep()  # a graph writes to the buffers with which it was captured

    def select(self, rows: Tensor) -> DecodingState:
        """Return the state of these rows, in this order."""
        old = self.rows
        sources = None if old.source_lengths is None else old.source_lengths[rows]
        new = Rows(old.lengths[rows], old.padding[rows], sources, old.least_source)
        return DecodingState(new, self.columns, {key: x.select(rows) for key, x in self.caches.items()})


def merged(parts: Sequence[DecodingState]) -> DecodingState:
    """Return the state of several batches as one, before their first step. The rows of each batch are equally long."""
    first, *others = parts
    if not others:
        return first
    rows, columns = [p.rows for p in parts], max(p.columns for p in parts)
    sources = [r.source_lengths for r in rows if r.source_lengths is not None]
    whole = Rows(
        torch.cat([r.lengths for r in rows]),
        torch.cat([p.rows.padding + (columns - p.columns) for p in parts]),
        torch.cat(sources) if sources else None,
        min(r.least_source for r in rows),
    )
    caches = {key: x.merge([p.caches[key] for p in others]) for key, x in first.caches.items()}
    return DecodingState(whole, columns, caches)
