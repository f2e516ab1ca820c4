"""The part of a parameter that this rank holds: all of it, or with FSDP the rows of its shard.

A sharded parameter has an attribute `row_shard`. So the optimizer, the norm of the gradients and checkpoints read plain
tensors, whichever class the parameter of a module has.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from megaloom.runtime.weights.views import View

Whole = TypeVar("Whole", Tensor, View)


@frozen(eq=False)
class RowShard:
    """The rows [start, stop) of a parameter, which this rank holds. The other ranks of the group hold the rest."""

    whole: nn.Parameter  # that of the module
    values: nn.Parameter  # a plain tensor [rows ..] in the memory of the shard; the optimizer updates it
    start: int
    stop: int
    group: dist.ProcessGroup
    dtype: torch.dtype  # of the gathered parameter


def row_shard(p: Tensor) -> RowShard | None:
    """Return the shard of a parameter that this rank holds; None if it holds the whole parameter.

    p: the parameter of a module, or the plain tensor of its rows.
    """
    found: RowShard | None = getattr(p, "row_shard", None)
    return found


def own_values(p: Tensor) -> Tensor:
    """Return the elements of a parameter that this rank holds, as a plain tensor."""
    shard = row_shard(p)
    return p if shard is None else shard.values


def gathered_dtype(p: Tensor) -> torch.dtype:
    """Return the type of a parameter where it is computed with."""
    shard = row_shard(p)
    return p.dtype if shard is None else shard.dtype


def own_rows(x: Whole, p: Tensor) -> Whole:
    """Return those rows of a tensor or view of a parameter's shape which this rank holds of the parameter."""
    shard = row_shard(p)
    return x if shard is None else x.narrow(0, shard.start, shard.stop - shard.start)
