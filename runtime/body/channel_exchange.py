"""Exchanges between shards of the sequence and shards of the channels, over context-parallel ranks.

Convolutions and scans run along the sequence. For them each rank takes whole sequences of 1/cp of the channels, by an
all-to-all before and another one after (see `dsl.facts.context_exchange`). Shared channels, of which a rank has fewer
than cp, are repeated first, so that each rank gets those of its heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from megaloom.runtime.megatron.kernels import from_zigzag, zigzag


def channel_shard(x: Tensor, channels: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of a tensor that all ranks have, along the dim `channels`."""
    x = _repeated(x, channels, group.size())
    return x.chunk(group.size(), channels)[group.rank()]


def sequence_to_channels(x: Tensor, seq: int, channels: int, group: dist.ProcessGroup) -> Tensor:
    """Return whole sequences of this rank's channels. x: this rank's part of the sequence, all channels.

    seq, channels: indices of the dims.
    """
    x = _repeated(x, channels, group.size())
    parts = x.unflatten(channels, (group.size(), -1)).movedim((channels, seq + (seq > channels)), (0, 1))
    received = _exchanged(parts, group)  # [rank, positions, the other dims in their order]
    return from_zigzag(received.flatten(0, 1), group.size()).movedim(0, seq)


def channels_to_sequence(x: Tensor, seq: int, channels: int, count: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the sequence of all channels, of which there are `count`.

    x: whole sequences of this rank's channels.
    """
    size = group.size()
    order = torch.cat([zigzag(x.shape[seq], size, rank) for rank in range(size)]).to(x.device)
    parts = x.movedim(seq, 0).index_select(0, order).unflatten(0, (size, -1))
    received = _exchanged(parts, group).movedim(1, seq + 1)  # [rank, x's dims]
    whole = received.movedim(0, channels).flatten(channels, channels + 1)
    return whole if whole.shape[channels] == count else whole[_every(channels, whole.shape[channels] // count)]


def _repeated(x: Tensor, channels: int, size: int) -> Tensor:
    """Return a tensor with each channel repeated, if there are fewer than `size`."""
    return x if x.shape[channels] >= size else x.repeat_interleave(size // x.shape[channels], channels)


def _every(dim: int, step: int) -> Any:
    """Return the index of every step-th element along a dim."""
    return (*(slice(None),) * dim, slice(None, None, step))


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x [rank, ..] with the first dim exchanged: the part of each rank that was meant for this one."""
    out: Tensor = all_to_all(group, x.contiguous())
    return out
