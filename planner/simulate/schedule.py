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
from numpy.typing import NDArray

from megaloom.planner.cost.memory import Moment

PERIODS = 4  # microbatch groups after which a schedule repeats its sets of micro-batches in flight
EXACT = 1e-13  # relative tolerance for sums of the same seconds in another order
WINDOW = 4  # periods that must take equally long: two, and as many again before them
SETTLED = 2  # windows that are simulated before the first comparison
WORTH = 0.7  # share of the micro-batches beyond which simulating all of them is faster

InFlight = tuple[int, ...]  # micro-batches in flight, by chunk


def warmup(rank: int, pp: int, vpp: int, microbatches: int, group: int = 0) -> int:
    """Return the number of forward passes of `rank` before its first forward pass that a backward pass follows.

    group: microbatch group, the micro-batches that a chunk runs before the next chunk does; 0 means pp. It means so in
    all functions of this module.
    """
    limit: int = warmup_limit(pp - rank - 1, vpp, group or pp)
    return min(limit, microbatches * vpp)


def warmup_limit(later_ranks: Any, vpp: int, group: Any) -> Any:
    """Return the warm-up of a rank with this many ranks after it, if micro-batches suffice. Numbers or arrays.

    Source: megatron-core 0.16.1, schedules.py:738.
    """
    return later_ranks if vpp == 1 else 2 * later_ranks + (vpp - 1) * group


def forward_order(pp: int, vpp: int, microbatches: int, group: int = 0) -> tuple[tuple[int, int], ...]:
    """Return the (micro-batch, chunk) of each forward pass of any rank: group by group, in each chunk by chunk.

    Source: megatron-core 0.16.1, schedules.py:798.
    """
    if vpp == 1:
        return tuple((i, 0) for i in range(microbatches))
    size = group or pp
    groups = (range(first, min(first + size, microbatches)) for first in range(0, microbatches, size))
    return tuple((i, chunk) for group in groups for chunk in range(vpp) for i in group)


@lru_cache(maxsize=256)
def visit_order(rank: int, pp: int, vpp: int, microbatches: int, group: int = 0) -> list[tuple[int, int]]:
    """Return the (visit, micro-batch) of each pass of `rank`: warm-up, steady 1F1B phase, cool-down."""
    rows = forward_order(pp, vpp, microbatches, group)
    forward = [(chunk * pp + rank, i) for i, chunk in rows]
    backward = [((vpp + chunk + 1) * pp - 1 - rank, i) for i, chunk in rows]
    first = warmup(rank, pp, vpp, microbatches, group)
    steady = [visit for pair in zip(forward[first:], backward, strict=False) for visit in pair]
    return forward[:first] + steady + backward[len(forward) - first :]


def rank_moments(rank: int, pp: int, vpp: int, microbatches: int, group: int = 0) -> list[Moment]:
    """Return the moments at which the memory of `rank` may be largest: starts of backward passes, and losses."""
    moments = []
    for in_flight, (i, chunk) in backward_moments(rank, pp, vpp, microbatches, group).items():
        moments.append(Moment(_backward_start(i, chunk, vpp), in_flight))
    if rank == pp - 1:
        for in_flight, i in loss_moments(pp, vpp, microbatches, group).items():
            moments.append(Moment(f"loss of micro-batch {i}", in_flight, loss=True))
    return moments


def _backward_start(microbatch: int, chunk: int, vpp: int) -> str:
    """Return the name of the moment at which a backward pass of a rank begins."""
    numbers = f"micro-batch {microbatch}" + (f", model chunk {chunk}" if vpp > 1 else "")
    first = (microbatch, chunk) == (0, vpp - 1)
    return f"start of the first backward pass ({numbers})" if first else f"start of the backward pass of {numbers}"


@lru_cache(maxsize=4096)
def backward_moments(
    rank: int, pp: int, vpp: int, microbatches: int, group: int = 0
) -> dict[InFlight, tuple[int, int]]:
    """Return each set of micro-batches in flight at a backward pass that follows a forward pass on `rank`.

    The value is the (micro-batch, chunk) of the first such backward pass. After the warm-up, of at most two groups,
    the sets repeat with every group of micro-batches; the last group may be smaller.
    """
    few, rows, first = _few_groups(rank, pp, vpp, microbatches, group)
    now = [sum(chunk == c for _, chunk in rows[:first]) for c in range(vpp)]
    if first == len(rows):
        return {tuple(now): (rows[0][0], vpp - 1)}
    seen: dict[InFlight, tuple[int, int]] = {}
    for (_, new), (i, old) in zip(rows[first:], rows, strict=False):
        now[new] += 1
        seen.setdefault(tuple(now), (_numbered(i, few, microbatches, group or pp), vpp - 1 - old))
        now[vpp - 1 - old] -= 1
    return seen


@lru_cache(maxsize=4096)
def loss_moments(pp: int, vpp: int, microbatches: int, group: int = 0) -> dict[InFlight, int]:
    """Return each set of micro-batches in flight on the last rank at a loss, with the first such micro-batch."""
    few, rows, first = _few_groups(pp - 1, pp, vpp, microbatches, group)
    now, seen = [0] * vpp, dict[InFlight, int]()
    for k, (i, new) in enumerate(rows):
        now[new] += 1
        if new == vpp - 1:
            seen.setdefault(tuple(now), _numbered(i, few, microbatches, group or pp))
        if k >= first:
            now[vpp - 1 - rows[k - first][1]] -= 1
    return seen


def _few_groups(
    rank: int, pp: int, vpp: int, microbatches: int, group: int
) -> tuple[int, Sequence[tuple[int, int]], int]:
    """Return as many micro-batches as show every set in flight, their forward passes, and the length of the warm-up."""
    size = group or pp
    few = min(microbatches, PERIODS * size + microbatches % size)
    return few, forward_order(pp, vpp, few, group), warmup(rank, pp, vpp, few, group)


def _numbered(i: int, few: int, microbatches: int, size: int) -> int:
    """Return the number among all micro-batches of micro-batch i of these few; both end with the last group."""
    return i if i < few - few % size else i + microbatches - few


def in_flight_sets(rank: int, pp: int, vpp: int, microbatches: int, group: int = 0) -> tuple[InFlight, ...]:
    """Return the largest sets of micro-batches that `rank` has in flight; no set is within another one."""
    return tuple(sorted(backward_moments(rank, pp, vpp, microbatches, group)))


def in_flight_table(pp: int, vpp: int, microbatches: int, group: int = 0) -> NDArray[np.int64]:
    """Return `in_flight_sets` of every rank: [ranks, sets, chunks]; a rank with fewer sets repeats its first one."""
    size = (group or pp) if vpp > 1 else pp
    return _in_flight_table(pp, vpp, min(microbatches, PERIODS * size + microbatches % size), group)


@lru_cache(maxsize=1024)
def _in_flight_table(pp: int, vpp: int, microbatches: int, group: int) -> NDArray[np.int64]:
    every = [in_flight_sets(rank, pp, vpp, microbatches, group) for rank in range(pp)]
    most = max(map(len, every))
    return np.array([[*sets, *[sets[0]] * (most - len(sets))] for sets in every], dtype=np.int64)


@lru_cache(maxsize=1024)
def in_flight_moments(pp: int, vpp: int, microbatches: int, group: int = 0) -> tuple[NDArray[np.float64], int]:
    """Return `in_flight_table`, then the loss moments of the last rank, and the number of the former.

    Shape [ranks, moments, chunks]; at the loss moments the other ranks have zeros.
    """
    backwards, losses = in_flight_table(pp, vpp, microbatches, group), loss_moments(pp, vpp, microbatches, group)
    at_loss = np.zeros((pp, len(losses), vpp))
    at_loss[-1] = list(losses)
    return np.hstack([backwards, at_loss]), backwards.shape[1]


def send_seconds(transfer: Sequence[float], pp: int, microbatches: int) -> tuple[float, ...]:
    """Return how long its own p2p sends keep each rank from computing; 0 with several chunks a rank."""
    if len(transfer) + 1 > pp:
        return (0.0,) * pp
    return tuple(microbatches * sum(transfer[max(0, r - 1) : min(r + 1, pp - 1)]) for r in range(pp))


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
    rest = microbatches % period
    few = rest + period * (-(-warmup(0, pp, vpp, microbatches, group) // (vpp * period)) + WINDOW * SETTLED)
    times = (forward, backward, transfer, pp)
    while few < microbatches * WORTH:
        starts = start_times(*times, few, group)
        first = [warmup(r, pp, vpp, few, group) for r in range(pp)]
        delay = _period_seconds(starts, first, vpp * (few - rest), vpp * period)
        if delay is not None:
            skipped = delay * ((microbatches - few) // period)
            return tuple(begun[-1] + backward[rank] + skipped for rank, begun in enumerate(starts))
        few += period * (-(-3 * few // period))
    return tuple(b[-1] + backward[rank] for rank, b in enumerate(start_times(*times, microbatches, group)))


def _period_seconds(
    starts: Sequence[Sequence[float]], first: Sequence[int], forwards: int, period: int
) -> float | None:
    """Return how much later each pass starts than in the period before, if all passes agree; else None.

    It compares the last periods of the steady phase. first: warm-up of each rank. forwards: forward passes in full
    groups.
    """
    delay: float | None = None
    for begun, warm in zip(starts, first, strict=True):
        stop = warm + 2 * (forwards - warm)
        recent = np.array(begun[max(warm, stop - WINDOW * 2 * period) : stop])
        if len(recent) < 6 * period:
            return None
        apart = recent[2 * period :] - recent[: -2 * period]
        delay = float(apart[0]) if delay is None else delay
        if np.abs(apart - delay).max() > EXACT * recent[-1]:
            return None
    return delay


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
