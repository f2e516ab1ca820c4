"""Checkpoint shards of padded parameters. A checkpoint holds a parameter without its padding, which the layout decides.

A padded parameter has two attributes: `pad_dim`, the dim that is padded, and `unpadded`, its size without padding.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor

from .process_groups import ProcessGroups


def mark_padded(p: Tensor, dim: int, unpadded: int) -> None:
    """Note on a parameter which dim is padded, and the size of the whole dim without padding."""
    p.pad_dim, p.unpadded = dim, unpadded  # type: ignore[attr-defined]


def padded_shard(key: str, p: Tensor, groups: ProcessGroups) -> ShardedTensorFactory:
    """Return this rank's shard of a padded parameter, as the elements of it that are no padding."""
    dim, unpadded = p.pad_dim, p.unpadded  # type: ignore[attr-defined]
    local = p.shape[dim]
    first = groups.tp_rank * local if getattr(p, "partition_dim", -1) == dim else 0
    count = max(0, min(local, unpadded - first))

    def build(key: str, data: Tensor, replica_id: Any, flattened_range: object) -> ShardedTensor:
        if not count:  # a rank that has only padding reads one element of the dim, and does not use it
            replica_id = (1 + groups.tp_rank, *replica_id[1:])
        part = data.narrow(dim, 0, max(count, 1))
        return ShardedTensor(
            key,
            part,
            part.dtype,
            tuple(part.shape),
            tuple(unpadded if i == dim else n for i, n in enumerate(data.shape)),
            tuple(first if i == dim and count else 0 for i in range(data.ndim)),
            None,
            replica_id=replica_id,
            allow_shape_mismatch=True,  # earlier checkpoints hold padding
        )

    def merge(part: Tensor) -> Tensor:
        return with_padding(part.narrow(dim, 0, count), dim, local)

    return ShardedTensorFactory(key, p, build, merge, (0, 0, groups.collection.dp_cp.rank()))


def with_padding(x: Tensor, dim: int, size: int) -> Tensor:
    """Return a tensor with zeros behind it along a dim, which then has this size."""
    if x.shape[dim] == size:
        return x
    return torch.cat([x, x.new_zeros([size - n if i == dim else n for i, n in enumerate(x.shape)])], dim)
