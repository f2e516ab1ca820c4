"""megatron-core's pipeline schedules, 1F1B and interleaved 1F1B, simulated event by event.

Stages are numbered in model order: stage s is chunk s // pp of rank s % pp. A micro-batch visits all stages forward and
then all stages backward: 2 * stages visits, numbered 0, 1, …. `finish_times` gives the end of each rank's last
backward pass, `memory_moments` the micro-batches in flight. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from megaloom.planner.contract.layouts import Column, Rows

PERIODS = 4  # microbatch groups after which a schedule repeats its sets of micro-batches in flight
EXACT = 1e-13  # relative tolerance for sums of the same seconds in another order
WINDOW = 4  # periods that must take equally long: two, and as many again before them
SETTLED = 2  # windows that are simulated before the first comparison
WORTH = 0.7  # share of the micro-batches beyond which simulating all of them is faster


@frozen(eq=False)
class Moments:
    """Moments of a step at which the memory of a rank may be largest, of all ranks."""

    in_flight: Rows  # [ranks, moments, chunks] micro-batches in flight
    backward: NDArray[np.bool_]  # [moments] True at starts of backward passes, which come first; then come losses
    loss: NDArray[np.bool_]  # [ranks, moments] True at the losses of a rank
    order: NDArray[np.intp]  # [ranks, moments] number of each moment: backward passes in their order, then losses
    names: tuple[str, ...]  # by number of the moment


def warmup(rank: Any, pp: int, vpp: int, microbatches: Any, group: Any = 0) -> Any:
    """Return the number of forward passes of `rank` before its first forward pass that a backward pass follows.

    group: microbatch group, the micro-batches that a chunk runs before the next chunk does; 0 means pp. It means so in
    all functions of this module. Numbers or arrays. Source: megatron-core 0.16.1, schedules.py:738.
    """
    later_ranks = pp - rank - 1
    limit = later_ranks if vpp == 1 else 2 * later_ranks + (vpp - 1) * (group + pp * (group == 0))
    return np.minimum(limit, microbatches * vpp)


def first_in_flight(pp: int, vpp: int, microbatches: Column, group: Column) -> Column:
    """Return the micro-batches in flight at each rank's first backward pass: [schedules] -> [schedules, chunks, ranks].

    No rank ever has more in flight, over all its chunks. A rank runs a group of micro-batches in each chunk in turn,
    then begins the next group, of which it has run fewer than pp in its first chunk by then.
    """
    m = microbatches[:, None, None]
    size = np.minimum(group[:, None, None] + pp * (group[:, None, None] == 0), m) if vpp > 1 else m
    forwards = np.minimum(warmup(np.arange(pp), pp, vpp, m, size) + 1, m * vpp)
    before = np.arange(vpp)[:, None] * size  # forward passes of the first group before those of each chunk
    first: Column = np.clip(forwards - before, 0, size) + np.clip(forwards - (before + vpp * size), 0, size)
    return first


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


@lru_cache(maxsize=1024)
def memory_moments(pp: int, vpp: int, microbatches: int, group: int = 0) -> Moments:
    """Return the moments at which the memory of a rank may be largest.

    They are backward passes right after a forward pass, and losses; each set of micro-batches in flight counts once,
    at its first moment. A rank with fewer sets repeats its first one; at losses all ranks but the last have zeros.
    After the warm-up, of at most two groups, the sets repeat with every group of micro-batches; the last group may be
    smaller. So a schedule of a few groups has all of them.
    """
    size = (group or pp) if vpp > 1 else pp
    few = min(microbatches, PERIODS * size + microbatches % size)
    groups = [range(first, min(first + size, few)) for first in range(0, few, size)]
    # Chunk and micro-batch of the forward passes, in order; backward passes take the chunks in reverse.
    chunks, numbers = np.array([(chunk, i) for each in groups for chunk in range(vpp) for i in each]).T
    numbers[numbers >= few - few % size] += microbatches - few  # the last group is that of all micro-batches
    begun = np.concatenate([np.zeros((1, vpp)), np.cumsum(np.eye(vpp)[chunks], axis=0)])  # before each forward pass
    ended, count = begun[:, ::-1], len(chunks)  # ended: before each backward pass
    first = [int(warmup(rank, pp, vpp, few, size)) for rank in range(pp)]
    pairs = [begun[n + 1 :] - ended[: count - n] if n < count else begun[-1:] for n in first]
    sets = [np.unique(each, axis=0, return_index=True) for each in pairs]
    losses = np.flatnonzero(chunks == vpp - 1)
    at_loss = begun[losses + 1] - ended[np.maximum(0, losses - first[-1])]
    distinct = np.sort(np.unique(at_loss, axis=0, return_index=True)[1])
    backwards = max(len(passes) for _, passes in sets)
    in_flight = np.zeros((pp, backwards + len(distinct), vpp))
    order = np.zeros(in_flight.shape[:2], dtype=np.intp)
    for rank, (each, passes) in enumerate(sets):
        in_flight[rank, :backwards], order[rank, :backwards] = each[0], passes[0]
        in_flight[rank, : len(each)], order[rank, : len(each)] = each, passes
    in_flight[-1, backwards:], order[:, backwards:] = at_loss[distinct], count + distinct
    backward = np.arange(in_flight.shape[1]) < backwards
    labels = [f"micro-batch {i}" for i in numbers]
    if vpp > 1:
        labels = [f"{label}, model chunk {vpp - 1 - chunk}" for label, chunk in zip(labels, chunks, strict=True)]
    names = [f"start of the first backward pass ({labels[0]})"]
    names += [f"start of the backward pass of {label}" for label in labels[1:]]
    names += [f"loss of micro-batch {i}" for i in numbers[losses]]
    return Moments(in_flight, backward, ~backward & (np.arange(pp) == pp - 1)[:, None], order, tuple(names))


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
