"""Tensors that ops keep of earlier positions, for each row of a batch: keys and values, last inputs, states.

Rows of a batch are prompts, or the beams of prompts. `select` keeps, repeats and reorders them, `merge` joins batches.
Prompts of different lengths are aligned at their end: a shorter row has padding in its first columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from attrs import define, evolve, field, frozen
from torch import Tensor


class Kept(Protocol):
    """Tensors that an op keeps of the rows of a batch."""

    def select(self, rows: Tensor) -> Self:
        """Return what is kept of these rows, in this order; a row may be repeated."""

    def merge(self, others: Sequence[Self]) -> Self:
        """Return what is kept of the rows of several batches, one batch after the other."""


@define(eq=False)
class Columns:
    """Tensors [rows, heads, columns, channels] that grow by a column for each position, such as keys and values.

    window: the number of last columns that are kept; None keeps all.
    """

    buffers: tuple[Tensor, ...]  # with room for more columns
    count: int
    window: int | None = None

    @classmethod
    def of(cls, *tensors: Tensor, window: int | None = None) -> Columns:
        """Return tensors as they are, the last columns only if there is a window."""
        count = tensors[0].shape[2]
        kept = count if window is None else min(count, window)
        return cls(tuple(x.narrow(2, count - kept, kept).clone() for x in tensors), kept, window)

    def append(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Add a column to each tensor, and return all columns, those that leave the window included."""
        if self.window is not None:
            whole = tuple(torch.cat((x, new), 2) for x, new in zip(self.buffers, tensors, strict=True))
            self.count = min(self.count + 1, self.window)
            self.buffers = tuple(x.narrow(2, x.shape[2] - self.count, self.count) for x in whole)
            return whole
        if self.count == self.buffers[0].shape[2]:  # double the room, so that each column is copied twice on average
            self.buffers = tuple(F.pad(x, (0, 0, 0, self.count)) for x in self.buffers)
        for buffer, new in zip(self.buffers, tensors, strict=True):
            buffer[:, :, self.count] = new[:, :, 0]
        self.count += 1
        return tuple(x.narrow(2, 0, self.count) for x in self.buffers)

    def select(self, rows: Tensor) -> Columns:
        """Return the columns of these rows."""
        return evolve(self, buffers=tuple(x.narrow(2, 0, self.count).index_select(0, rows) for x in self.buffers))

    def merge(self, others: Sequence[Columns]) -> Columns:
        """Return the columns of several batches, zeros before those of shorter rows."""
        parts = (self, *others)
        count = max(part.count for part in parts)
        aligned = [[F.pad(x.narrow(2, 0, p.count), (0, 0, count - p.count, 0)) for x in p.buffers] for p in parts]
        return evolve(self, buffers=tuple(torch.cat(each) for each in zip(*aligned, strict=True)), count=count)


@frozen(eq=False)
class State:
    """A tensor [rows, ..] of a fixed size, such as a recurrent state or the last inputs of a convolution."""

    values: Tensor

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
    """The state of a batch: what the ops of this rank keep, and how long each row is."""

    lengths: Tensor  # int64 [rows]: tokens of each
    columns: int  # of the longest row
    source_lengths: Tensor | None  # int64 [rows]; None without an encoder
    most_padding: int = 0  # columns before the shortest row, or more
    least_source: int = 0  # tokens of the shortest source, or fewer
    kept: dict[tuple[str, object], Kept] = field(factory=dict)  # by node and op

    @property
    def padding(self) -> Tensor:
        """Return the columns before each row, [rows]."""
        return self.columns - self.lengths

    def select(self, rows: Tensor) -> Rows:
        """Return the state of these rows, in this order."""
        lengths = None if self.source_lengths is None else self.source_lengths[rows]
        kept = {key: x.select(rows) for key, x in self.kept.items()}
        return evolve(self, lengths=self.lengths[rows], source_lengths=lengths, kept=kept)


def merged(parts: Sequence[Rows]) -> Rows:
    """Return the state of several batches as one. The rows of each batch are equally long."""
    first, *others = parts
    if not others:
        return first
    sources = [p.source_lengths for p in parts if p.source_lengths is not None]
    columns = max(p.columns for p in parts)
    return Rows(
        torch.cat([p.lengths for p in parts]),
        columns,
        torch.cat(sources) if sources else None,
        columns - min(p.columns for p in parts),
        min(p.least_source for p in parts),
        {key: x.merge([p.kept[key] for p in others]) for key, x in first.kept.items()},
    )
