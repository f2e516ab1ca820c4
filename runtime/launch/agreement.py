"""Agreement of ranks: an error of one rank is raised on all of them, and so are differences between ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from megaloom.dsl.errors import UserError
from megaloom.runtime.megatron import device

T = TypeVar("T")
SHOWN_DIFFERENCES = 3


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
    if not any_rank(refusal is not None):
        return value  # type: ignore[return-value]
    found = gathered(None if refusal is None else (type(refusal), str(refusal), socket.gethostname()))
    rank, (kind, text, host) = next((rank, one) for rank, one in enumerate(found) if one)
    if refusal and str(refusal) == text:
        raise refusal
    raise kind(f"on rank {rank} ({host}): {text}" if names_rank else text)


def any_rank(flag: bool) -> bool:
    """Return whether a flag is True on any rank. Every rank calls it."""
    return bool(largest(int(flag))[0])


def largest(*values: int) -> list[int]:
    """Return the largest of each value on any rank. Every rank calls it. One rank alone does not ask its device."""
    if dist.get_world_size() == 1:
        return list(values)
    found = torch.tensor(values, device=device.current())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [int(value) for value in found.tolist()]


def from_first_rank(make: Callable[[], T]) -> T:
    """Return on all ranks what `make` returns on the first. If it raises UserError there, raise that on all of them.

    Every rank calls it.
    """
    held = [agreed(lambda: make() if dist.get_rank() == 0 else None, names_rank=False)]
    dist.broadcast_object_list(held)
    return held[0]  # type: ignore[return-value]


def gathered(value: T) -> list[T]:
    """Return the values of all ranks, in the order of ranks. Every rank calls it."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_equal(facts: Mapping[str, str], advice: str) -> None:
    """Raise UserError on all ranks unless all have the same facts. Every rank calls it.

    facts: a value by name, as the user knows it. The message names the first rank that differs from rank 0, its host,
    and the facts that differ; `advice` is its last line.
    """
    (host, expected), *others = gathered((socket.gethostname(), dict(facts)))
    for rank, (other, found) in enumerate(others, 1):
        names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
        if names:
            shown = [f"{name} is {found.get(name)}, not {expected.get(name)}" for name in names[:SHOWN_DIFFERENCES]]
            shown += [f"{len(names) - len(shown)} more"] * (len(names) > len(shown))
            raise UserError(f"rank {rank} ({other}) differs from rank 0 ({host}): {'; '.join(shown)}\n{advice}")
