"""Keys and values that are kept column by column are the last ones that were written, whatever the capacity was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megaloom.runtime.ops import kv_cache
from megaloom.runtime.ops.kv_cache import KVCache

HEADS, CHANNELS = 2, 3


def drawn(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, HEADS, columns, CHANNELS)


def written(columns: KVCache, new: Tensor) -> KVCache:
    """The columns after those of `new`, one at a time."""
    for i in range(new.shape[2]):
        columns.begin_column()
        columns.write(torch.tensor([(columns.count - 1) % columns.capacity]), new[:, :, i : i + 1])
    return columns


def last(columns: KVCache, count: int) -> Tensor:
    """The last columns that are kept, in order."""
    at = torch.arange(columns.count - count, columns.count) % columns.capacity
    return columns.buffers[0].index_select(2, at)


@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("prompt", [1, 5, 9])
def test_columns_are_the_last_ones(window: int | None, prompt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "BLOCK_COLUMNS", 4)
    whole = drawn(2, prompt + 11)
    for new in (0, 1, 4, 11):
        columns = written(KVCache.of(whole[:, :, :prompt], window=window), whole[:, :, prompt : prompt + new])
        count = min(window or columns.count, columns.count)
        assert torch.equal(last(columns, count), whole[:, :, prompt + new - count : prompt + new])
        assert columns.capacity <= min(window or 100, prompt + new + 3)


@pytest.mark.parametrize("window", [None, 4])
def test_batches_are_aligned_at_their_end(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "BLOCK_COLUMNS", 4)
    long, short, new = drawn(2, 7), drawn(1, 2), drawn(3, 3)
    parts = [KVCache.of(x, window=window) for x in (short, long)]
    merged = written(parts[0].merge(parts[1:]).select(torch.tensor([1, 0, 2])), new)
    padded = torch.cat((torch.zeros(1, HEADS, 5, CHANNELS), short), 2)
    expected = torch.cat((torch.cat((long[:1], padded, long[1:])), new), 2)
    count = window or 10
    assert torch.equal(last(merged, count), expected[:, :, 10 - count :])
