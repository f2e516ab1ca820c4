"""Rows of a table: by indices, or by position."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from megaloom.dsl import Lookup, PositionLookup, UserError, Value

from .local_op import LocalOp, TensorFunction
from .registry import local, whole, whole_function
from .tensors import dim_index


@whole.register
def _(op: Lookup, out: Value, *args: Tensor) -> Tensor:
    indices, table = args
    return table.movedim(dim_index(out.args[1].shape, op.key), 0)[indices]


@local.register
def _(op: Lookup, here: LocalOp) -> TensorFunction:
    if here.axis(op.key) == "tp" and here.groups.layout.tp > 1:
        return partial(_own_rows, op, here.out, rank=here.groups.tp_rank)
    return whole_function(here.out)


def _own_rows(op: Lookup, out: Value, indices: Tensor, table: Tensor, *, rank: int) -> Tensor:
    """Return the rows of this rank's shard of a table, and zeros for rows of other ranks."""
    rows = table.shape[dim_index(out.args[1].shape, op.key)]
    local_indices = indices - rank * rows
    is_local = (local_indices >= 0) & (local_indices < rows)
    result = whole(op, out, local_indices.where(is_local, 0), table)
    return result * is_local[(..., *(None for _ in range(result.ndim - is_local.ndim)))]


@whole.register
def _(op: PositionLookup, out: Value, *args: Tensor) -> Tensor:
    x, table = args
    count = x.shape[dim_index(out.args[0].shape, out.shape.dims[0].name)]
    rows = table.movedim(dim_index(out.args[1].shape, op.key), 0)
    if count + op.offset > len(rows):
        longest = len(rows) - op.offset
        raise UserError(f"a table {out.args[1].shape} has no rows for {count} positions: seq can be up to {longest}")
    return rows[op.offset : op.offset + count]
