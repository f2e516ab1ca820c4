"""Checkpoint shards of a module whose parameters are no rearrangements of weights: they have names of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensorFactory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor, nn

from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.megatron.weight_shards import RowShard, row_shard


def module_state(
    module: nn.Module, prefix: str, offsets: tuple[Any, ...], metadata: dict[str, Any], groups: ProcessGroups
) -> dict[str, Any]:
    """Return this rank's shards of a module, by the names of its parameters and buffers with a prefix."""
    tp, dp_cp = groups.collection.tp, metadata["dp_cp_group"]
    with _whole_parameters(module):
        if hasattr(module, "sharded_state_dict"):
            shards = sharded_state_dict_default(module, prefix, offsets, metadata, tp_group=tp)
        else:
            state = module.state_dict(keep_vars=True)
            tp_dims = {k: p.partition_dim for k, p in state.items() if getattr(p, "tensor_model_parallel", False)}
            shards = make_sharded_tensors_for_checkpoint(
                state, prefix, tp_dims, offsets, tp_group=tp, dp_cp_group=dp_cp
            )
    return {name: _with_own_rows(shard) for name, shard in shards.items()}


@contextmanager
def _whole_parameters(module: nn.Module) -> Iterator[None]:
    """Let plain tensors without values stand for parameters of which this rank holds rows, inside the context."""
    held = [(m, k, p) for m in module.modules() for k, p in m.named_parameters(recurse=False) if row_shard(p)]
    for m, name, p in held:
        whole = nn.Parameter(torch.empty(p.shape, device="meta"), requires_grad=p.requires_grad)
        vars(whole).update(vars(p))
        m.register_parameter(name, whole)
    try:
        yield
    finally:
        for m, name, p in held:
            m.register_parameter(name, p)


def _with_own_rows(whole: Any) -> Any:
    """Return the shards of the rows of a parameter that this rank holds; if it holds all of them, as they are."""
    data = whole.data if isinstance(whole, ShardedTensor | ShardedTensorFactory) else None
    shard = None if data is None else row_shard(data)
    if shard is None:
        return whole
    replica = (*whole.replica_id[:-1], 0)

    def build(key: str, values: Tensor, replica_id: Any, flattened_range: object) -> dict[str, Any]:
        pieces = _pieces(whole, key, replica_id)
        found = {str(i): part for i, part in enumerate(_parts(pieces, values, shard))}
        return found or {"none": LocalNonpersistentObject(values)}

    def merge(loaded: Mapping[str, Tensor]) -> Tensor:
        return torch.cat(list(loaded.values()))

    return ShardedTensorFactory(whole.key, shard.values, build, merge, replica)


def _pieces(whole: Any, key: str, replica_id: Any) -> list[ShardedTensor]:
    """Return the shards that the rows of a whole parameter are, in the order of the rows: gate and up are two."""
    if isinstance(whole, ShardedTensor):
        return [replace(whole, key=key, replica_id=replica_id)]
    empty = torch.empty(whole.data.shape, device="meta")
    return list(nested_values(whole.build_fn(key, empty, replica_id, whole.flattened_range)))


def _parts(pieces: list[ShardedTensor], values: Tensor, shard: RowShard) -> Iterator[ShardedTensor]:
    """Yield the parts of shards that lie in the rows of this rank, with their values."""
    first = 0
    for piece in pieces:
        rows = range(max(first, shard.start), min(first + piece.local_shape[0], shard.stop))
        if len(rows):
            offset = list(piece.global_offset)
            offset[piece.prepend_axis_num] += rows.start - first
            part = values[rows.start - shard.start : rows.stop - shard.start]
            yield replace(
                piece,
                data=part,
                dtype=part.dtype,
                local_shape=tuple(part.shape),
                global_offset=tuple(offset),
                axis_fragmentations=None,
            )
        first += piece.local_shape[0]
