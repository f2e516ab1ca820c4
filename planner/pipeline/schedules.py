"""megatron-core's pipeline schedules, 1F1B and interleaved 1F1B, simulated event by event.

Stages are numbered in model order: stage s is chunk s // pp of rank s % pp. A micro-batch visits all stages forward and
then all stages backward: 2 * stages visits, numbered 0, 1, …. `finish_times` gives the end of each rank's last
backward pass, `rank_moments` and `in_flight_moments` the micro-batches in flight. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from attrs import frozen

from megaloom.planner.contract.layouts import Rows

PERIODS = 4  # microbatch groups after which a schedule repeats its sets of micro-batches in flight
EXACT = 1e-13  # relative tolerance for sums of the same seconds in another order
WINDOW = 4  # periods that must take equally long: two, and as many again before them
SETTLED = 2  # windows that are simulated before the first comparison
WORTH = 0.7  # share of the micro-batches beyond which simulating all of them is faster

InFlight = tuple[int, ...]  # micro-batches in flight, by chunk


@frozen
class Moment:
    """A moment of a step at which the memory of a rank may be largest."""

    name: str
    in_flight: InFlight
    loss: bool = False  # at the loss; else at the start of a backward pass


def warmup(rank: Any, pp: int, vpp: int, microbatches: Any, group: Any = 0) -> Any:
    """Return the number of forward passes of `rank` before its first forward pass that a backward pass follows.

    group: microbatch group, the micro-batches that a chunk runs before the next chunk does; 0 means pp. It means so in
    all functions of this module. Numbers or arrays. Source: megatron-core 0.16.1, schedules.py:738.
    """
    later_ranks = pp - rank - 1
    limit = later_ranks if vpp == 1 else 2 * later_ranks + (vpp - 1) * (group + pp * (group == 0))
    return np.minimum(limit, microbatches * vpp)


@lru_cache(maxsize=256)
def visit_order(rank: int, pp: int, vpp: int, microbatches: int, group: int = 0) -> list[tuple[int, int]]:
    """Return the (visit, micro-batch) of each pass of `rank`: warm-up, steady 1F1B phase, cool-down.

    Passes of one direction go group by group, in each chunk by chunk. Source: megatron-core 0.16.1, schedules.py:798.
    """
    size = group or pp
    groups = [range(first, min(first + size, microbatches)) for first in range(0, microbatches, size)]
    rows = [(chunk, i) for group_ in groups for chunk in range(vpp) for i in group_]
    forward = [(chunk * pp + rank, i) for chunk, i in rows]
    backward = [((vpp + chunk + 1) * pp - 1 - rank, i) for chunk, i in rows]
    first = warmup(rank, pp, vpp, microbatches, group)
    steady = [visit for pair in zip(forward[first:], backward, strict=False) for visit in pair]
    return forward[:first] + steady + backward[len(forward) - first :]


@lru_cache(maxsize=4096)
def rank_moments(rank: int, pp: int, vpp: int, microbatches: int, group: int = 0) -> tuple[Moment, ...]:
    """Return the moments at which the memory of `rank` may be largest.

    They are backward passes right after a forward pass, and losses; each set of micro-batches in flight counts once.
    After the warm-up, of at most two groups, the sets repeat with every group of micro-batches; the last group may be
    smaller. So a schedule of a few groups has all of them.
    """
    size = group or pp
    few = min(microbatches, PERIODS * size + microbatches % size)
    last, in_flight, after_forward = pp * vpp - 1, [0] * vpp, False
    moments: dict[tuple[bool, InFlight], Moment] = {}
    for visit, i in visit_order(rank, pp, vpp, few, group):
        number = i if i < few - few % size else i + microbatches - few  # among all micro-batches
        forward = visit <= last
        chunk = (visit if forward else 2 * last + 1 - visit) // pp
        in_flight[chunk] += forward
        if visit == last or (after_forward and not forward):
            name = f"micro-batch {number}" + (f", model chunk {chunk}" if vpp > 1 and not forward else "")
            if forward:
                name = f"loss of {name}"
            elif (number, chunk) == (0, vpp - 1):
                name = f"start of the first backward pass ({name})"
            else:
                name = f"start of the backward pass of {name}"
            held = tuple(in_flight)
            moments.setdefault((forward, held), Moment(name, held, loss=forward))
        in_flight[chunk] -= not forward
        after_forward = forward
    return tuple(moments.values())


@lru_cache(maxsize=1024)
def in_flight_moments(pp: int, vpp: int, microbatches: int, group: int = 0) -> tuple[Rows, int]:
    """Return the micro-batches in flight at the moments of all ranks, and how many of these are backward passes.

    Shape [ranks, moments, chunks]. First come the distinct sets at starts of backward passes; a rank with fewer sets
    repeats its first one. Then come losses, at which all ranks but the last have zeros.
    """
    size = (group or pp) if vpp > 1 else pp
    few = min(microbatches, PERIODS * size + microbatches % size)
    groups = [min(size, few - first) for first in range(0, few, size)]
    chunks = np.concatenate([np.repeat(np.arange(vpp), count) for count in groups])  # of the forward passes, in order
    begun = np.concatenate([np.zeros((1, vpp)), np.cumsum(np.eye(vpp)[chunks], axis=0)])  # before each forward pass
    ended = begun[:, ::-1]  # before each backward pass
    first = [int(warmup(rank, pp, vpp, few, size)) for rank in range(pp)]
    sets = [
        np.unique(begun[n + 1 :] - ended[: len(chunks) - n] if n < len(chunks) else begun[-1:], axis=0) for n in first
    ]
    losses = np.flatnonzero(chunks == vpp - 1)
    at_loss, order = np.unique(begun[losses + 1] - ended[np.maximum(0, losses - first[-1])], axis=0, return_index=True)
    backwards = max(map(len, sets))
    out = np.zeros((pp, backwards + len(at_loss), vpp))
    for rank, distinct in enumerate(sets):
        out[rank, :backwards] = distinct[0]
        out[rank, : len(distinct)] = distinct
    out[-1, backwards:] = at_loss[np.argsort(order)]
    return out, backwards


def finish_times(
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float],
    pp: int,
    microbatches: int,
    group: int = 0,
) -> tuple[float, ...]:
    """Return when each rank ends its last backward pass.

    Starts of passes are sums and maxima, so once each pass of two periods (microbatch groups) starts a constant later
    than in the period before, all later periods repeat it. Those between are not simulated.
    """
    vpp = len(forward) // pp
    period = 1 if vpp == 1 else group or pp
    passes = 2 * vpp * period  # of a rank in one period
    rest = microbatches % period
    longest = int(warmup(0, pp, vpp, microbatches, group))
    few = rest + period * (-(-longest // (vpp * period)) + WINDOW * SETTLED)
    while few < microbatches * WORTH:
        starts = start_times(forward, backward, transfer, pp, few, group)
        stops = 2 * vpp * (few - rest) - warmup(np.arange(pp), pp, vpp, few, group)  # of the steady phase
        recent = np.array([begun[stop - WINDOW * passes : stop] for begun, stop in zip(starts, stops, strict=True)])
        delays = recent[:, passes:] - recent[:, :-passes]  # of each pass after the one of the period before
        delay = float(delays[0, 0])
        if (np.abs(delays - delay) <= EXACT * recent[:, -1:]).all():
            skipped = delay * ((microbatches - few) // period)
            return tuple(begun[-1] + backward[rank] + skipped for rank, begun in enumerate(starts))
        few += period * (-(-3 * few // period))
    starts = start_times(forward, backward, transfer, pp, microbatches, group)
    return tuple(begun[-1] + backward[rank] for rank, begun in enumerate(starts))


def start_times(
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float],
    pp: int,
    microbatches: int,
    group: int,
) -> list[list[float]]:
    """Return when each pass of each rank starts, in the rank's order.

    A pass starts as soon as its rank is free and its input has arrived. transfer[s]: seconds of the p2p send between
    stages s and s + 1, either way. With one chunk a rank, a rank sends before it goes on (megatron-core's blocking
    exchange); with several, it sends while it computes (`overlap_p2p_comm`, the only correct setting there).
    """
    stages = len(forward)
    vpp = stages // pp
    seconds = (*forward, *reversed(backward))
    sends = (*transfer[: stages - 1], 0.0, *reversed(transfer[: stages - 1]), 0.0)
    ranks = [*range(pp)] * vpp + [*reversed(range(pp))] * vpp + [0]
    orders = [visit_order(rank, pp, vpp, microbatches, group) for rank in range(pp)]
    arrived: list[list[float | None]] = [[None] * microbatches for _ in range(2 * stages + 1)]
    arrived[0] = [0.0] * microbatches
    starts: list[list[float]] = [[] for _ in orders]
    free = [0.0] * pp
    ready = list(range(pp))
    waiting: list[tuple[int, int] | None] = [None] * pp  # for the input of this (visit, micro-batch)
    while ready:
        rank = ready.pop()
        order, begun, now = orders[rank], starts[rank], free[rank]
        for k in range(len(begun), len(order)):
            visit, i = order[k]
            came = arrived[visit][i]
            if came is None:
                waiting[rank] = order[k]
                break
            start = came if came > now else now
            begun.append(start)
            now = start + seconds[visit]
            arrived[visit + 1][i] = sent = now + sends[visit]
            if vpp == 1:
                now = sent
            receiver = ranks[visit + 1]
            if waiting[receiver] and waiting[receiver] == (visit + 1, i):
                waiting[receiver] = None
                ready.append(receiver)
        free[rank] = now
    assert all(len(s) == len(o) for s, o in zip(starts, orders, strict=True)), "a schedule in which ranks wait forever"
    return starts
