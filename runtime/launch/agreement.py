"""Agreement of ranks: an error of one rank is raised on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from megaloom.dsl.errors import UserError
from megaloom.runtime.megatron import device

T = TypeVar("T")


def agreed(make: Callable[[], T], *, names_rank: bool = True) -> T:
    """Return what `make` returns. If it raises UserError on any rank, raise that of the first such rank on all ranks.

    Every rank calls it. So no rank waits in a collective for one that has refused. names_rank: on other ranks, the
    message begins with the rank.
    """
    value: T | None = None
    refusal: UserError | None = None
    try:
        value = make()
    except UserError as error:
        refusal = error
    refused = torch.tensor(int(refusal is not None), device=device.current())
    dist.all_reduce(refused, op=dist.ReduceOp.MAX)
    if not refused:
        return value  # type: ignore[return-value]
    own = None if refusal is None else (type(refusal), str(refusal))
    refusals: list[tuple[type[UserError], str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(refusals, own)
    rank, (kind, text) = next((rank, found) for rank, found in enumerate(refusals) if found)
    if own and own[1] == text:
        raise refusal or kind(text)
    raise kind(f"on rank {rank}: {text}" if names_rank else text)
