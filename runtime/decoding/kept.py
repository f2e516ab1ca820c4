"""Tensors that ops keep of earlier positions, for each row of a batch: keys and values, last inputs, states.

Rows of a batch are prompts, or the beams of prompts. `select` keeps, repeats and reorders them, `merge` joins batches.
Prompts of different lengths are aligned at their end: a shorter row has padding in its first columns. Steps write in
place. The capacity for keys and values grows in blocks: attention reads all of it, and masks empty columns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from attrs import define, evolve, field, frozen
from torch import Tensor

from .repeated_step import RepeatedStep

Shared = TypeVar("Shared")

BLOCK_COLUMNS = 256
"""Columns by which the capacity for keys and values grows."""


class Kept(Protocol):
    """Tensors that an op keeps of the rows of a batch."""

    def select(self, rows: Tensor) -> Self:
        """Return what is kept of these rows, in this order; a row may be repeated."""

    def merge(self, others: Sequence[Self]) -> Self:
        """Return what is kept of the rows of several batches, one batch after the other."""


@define(eq=False)
class Columns:
    """Tensors [rows, heads, capacity, channels] with a column for each position, such as keys and values.

    Column c is at index c % capacity. window: the number of last columns that are kept; None keeps all.
    """

    buffers: tuple[Tensor, ...]
    count: int  # columns until now, those before the window included
    window: int | None = None

    @classmethod
    def of(cls, *tensors: Tensor, window: int | None = None) -> Columns:
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

    def select(self, rows: Tensor) -> Columns:
        """Return the columns of these rows."""
        return evolve(self, buffers=tuple(x.index_select(0, rows) for x in self.buffers))

    def merge(self, others: Sequence[Columns]) -> Columns:
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
class State:
    """A tensor [rows, ..] of a fixed size, such as a recurrent state or the last inputs of a convolution."""

    values: Tensor

    def write(self, values: Tensor) -> None:
        """Replace the values, in place."""
        self.values.copy_(values)

    def select(self, rows: Tensor) -> State:
        """Return the values of these rows."""
        return State(self.values.index_select(0, rows))

    def merge(self, others: Sequence[State]) -> State:
        """Return the values of several batches."""
        return State(torch.cat([self.values, *(x.values for x in others)]))


@frozen(eq=False)
class Once:
    """A tensor that is computed once, such as the keys of an encoder's output.

    rows: the index of its batch dim; None if it has none. source: that of an encoder's positions, if it has any.
    """

    values: Tensor
    rows: int | None
    source: int | None

    def select(self, rows: Tensor) -> Once:
        """Return the values of these rows."""
        return self if self.rows is None else evolve(self, values=self.values.index_select(self.rows, rows))

    def merge(self, others: Sequence[Once]) -> Once:
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
class Rows:
    """The state of a batch: what the ops of this rank keep, and how long each row is.

    A step writes into these tensors, so that a CUDA graph can repeat it.
    """

    lengths: Tensor  # int64 [rows]: tokens of each
    padding: Tensor  # int64 [rows]: columns before each row
    columns: int  # of the longest row, before the first step
    source_lengths: Tensor | None = None  # int64 [rows]; None without an encoder
    least_source: int = 0  # tokens of the shortest source, or fewer
    kept: dict[tuple[str, object], Kept] = field(factory=dict)  # by node and op
    shared: dict[Hashable, Any] = field(factory=dict)  # computed once in a step, for all layers
    repeated: RepeatedStep = field(factory=RepeatedStep)

    def begin_step(self) -> None:
        """Reserve memory for one more position of each row."""
        grown = [x.begin_column() for x in self.kept.values() if isinstance(x, Columns)]
        if any(grown):
            self.repeated = RepeatedStep()  # a graph writes to the buffers with which it was captured

    def count_position(self) -> None:
        """Add one to the lengths, on the device, and forget what was computed for the position before."""
        self.lengths += 1
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

    def select(self, rows: Tensor) -> Rows:
        """Return the state of these rows, in this order."""
        sources = None if self.source_lengths is None else self.source_lengths[rows]
        kept = {key: x.select(rows) for key, x in self.kept.items()}
        return Rows(self.lengths[rows], self.padding[rows], self.columns, sources, self.least_source, kept)


def merged(parts: Sequence[Rows]) -> Rows:
    """Return the state of several batches as one, before their first step. The rows of each batch are equally long."""
    first, *others = parts
    if not others:
        return first
    sources = [p.source_lengths for p in parts if p.source_lengths is not None]
    columns = max(p.columns for p in parts)
    return Rows(
        torch.cat([p.lengths for p in parts]),
        torch.cat([p.padding + (columns - p.columns) for p in parts]),
        columns,
        torch.cat(sources) if sources else None,
        min(p.least_source for p in parts),
        {key: x.merge([p.kept[key] for p in others]) for key, x in first.kept.items()},
    )
