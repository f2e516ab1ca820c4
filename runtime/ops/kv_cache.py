"""The state of an op in decoding, for each row of a batch: KV caches, last inputs, states of scans.

Rows of a batch are prompts, or the beams of prompts. `select` keeps, repeats and reorders them, `merge` joins batches.
Prompts of different lengths are aligned at their end: a shorter row has padding in its first columns. Steps write in
place. The capacity of a KV cache grows in blocks: attention reads all of it, and masks empty columns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, Self, TypeVar

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

Shared = TypeVar("Shared")

BLOCK_COLUMNS = 256
"""Columns by which the capacity of a KV cache grows."""


class OpState(Protocol):
    """Tensors that an op needs of earlier positions, for the rows of a batch."""

    def select(self, rows: Tensor) -> Self:
        """Return the state of these rows, in this order; a row may be repeated."""

    def merge(self, others: Sequence[Self]) -> Self:
        """Return the state of the rows of several batches, one batch after the other."""


@frozen(eq=False)
class Rows:
    """The rows of a batch at the newest position.

    A step writes into these tensors, so that a CUDA graph can repeat it.
    """

    lengths: Tensor  # int64 [rows]: tokens of each
    padding: Tensor  # int64 [rows]: columns before each row
    source_lengths: Tensor | None = None  # int64 [rows]: tokens that an encoder reads; None without an encoder
    least_source: int = 0  # tokens of the shortest source, or fewer
    shared: dict[Hashable, Any] = field(factory=dict)  # computed once in a step, for all layers

    def count_position(self) -> None:
        """Add one to the lengths, on the device, and forget what was computed for the position before."""
        self.lengths.add_(1)
        self.shared.clear()

    def once(self, key: Hashable, make: Callable[[], Shared]) -> Shared:
        """Return what all layers share in a step, such as angles. The first one that reads it makes it."""
        if key not in self.shared:
            self.shared[key] = make()
        found: Shared = self.shared[key]
        return found

    @property
    def newest(self) -> Tensor:
        """Return the newest column, [1]. It is the same for all rows, which are aligned at their end."""
        return self.once("newest", lambda: (self.lengths + self.padding)[:1] - 1)

    @property
    def positions(self) -> Tensor:
        """Return the position of the newest token of each row, [rows, 1]."""
        return self.once("positions", lambda: (self.lengths - 1)[:, None])


@define(eq=False)
class KVCache:
    """Keys and values, [rows, heads, capacity, channels], with a column for each position.

    Column c is at index c % capacity. window: the number of last columns that are kept; None keeps all.
    """

    buffers: tuple[Tensor, ...]
    count: int  # columns until now, those before the window included
    window: int | None = None

    @classmethod
    def of(cls, *tensors: Tensor, window: int | None = None) -> KVCache:
        """Return tensors as they are, the last columns only if there is a window."""
        whole = cls(tensors, tensors[0].shape[2], window)
        return evolve(whole, buffers=whole._moved(min(whole.count, window or whole.count)))

    @property
    def capacity(self) -> int:
        """Return the number of columns that the buffers hold."""
        return self.buffers[0].shape[2]

    def begin_column(self) -> bool:
        """Count one more column, and enlarge full buffers. Return True if they are other tensors now."""
        full = self.count >= self.capacity != self.window
        if full:
            capacity = -(-(self.count + 1) // BLOCK_COLUMNS) * BLOCK_COLUMNS
            self.buffers = self._moved(capacity if self.window is None else min(capacity, self.window))
        self.count += 1
        return full

    def write(self, index: Tensor, *tensors: Tensor) -> None:
        """Write the newest column of each tensor, at index [1]."""
        for buffer, new in zip(self.buffers, tensors, strict=True):
            buffer.index_copy_(2, index, new)

    def select(self, rows: Tensor) -> KVCache:
        """Return the columns of these rows."""
        return evolve(self, buffers=tuple(x.index_select(0, rows) for x in self.buffers))

    def merge(self, others: Sequence[KVCache]) -> KVCache:
        """Return the columns of several batches, zeros before those of shorter rows."""
        parts = (self, *others)
        count, capacity = max(part.count for part in parts), max(part.capacity for part in parts)
        aligned = [part._moved(capacity, count - part.count) for part in parts]
        return evolve(self, buffers=tuple(torch.cat(each) for each in zip(*aligned, strict=True)), count=count)

    def _moved(self, capacity: int, by: int = 0) -> tuple[Tensor, ...]:
        """Return copies of the buffers of another capacity, and each column `by` later."""
        where = self.buffers[0].device
        columns = torch.arange(max(0, self.count - min(capacity, self.capacity)), self.count, device=where)
        sources, targets = columns % self.capacity, (columns + by) % capacity
        zeros = (x.new_zeros(*x.shape[:2], capacity, x.shape[3]) for x in self.buffers)
        return tuple(
            y.index_copy_(2, targets, x.index_select(2, sources)) for x, y in zip(self.buffers, zeros, strict=True)
        )


@frozen(eq=False)
class FixedState:
    """A tensor [rows, ..] of a fixed size, such as a recurrent state or the last inputs of a convolution."""

    values: Tensor

    def write(self, values: Tensor) -> None:
        """Replace the values, in place."""
        self.values.copy_(values)

    def select(self, rows: Tensor) -> FixedState:
        """Return the values of these rows."""
        return FixedState(self.values.index_select(0, rows))

    def merge(self, others: Sequence[FixedState]) -> FixedState:
        """Return the values of several batches."""
        return FixedState(torch.cat([self.values, *(x.values for x in others)]))
