"""megatron-core's pipeline schedules, 1F1B and interleaved 1F1B, simulated event by event.

Stages are numbered in model order: stage s is chunk s // pp of rank s % pp. A micro-batch visits all stages forward and
then all stages backward: 2 * stages visits, numbered 0, 1, …. `finish_times` gives the end of each rank's last
backward pass, `memory_moments` the micro-batches in flight. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from megaloom.planner.contract.layouts import Column, Rows, alike

PERIODS = 4  # microbatch groups after which a schedule repeats its sets of micro-batches in flight
EXACT = 1e-13  # relative tolerance for sums of the same seconds in another order
WINDOW = 4  # periods that must take equally long: two, and as many again before them
SETTLED = 2  # windows that are simulated before the first comparison
WORTH = 0.7  # share of the micro-batches beyond which simulating all of them is faster


@frozen(eq=False, slots=False)
class Moments:
    """Moments of a step at which the memory of a rank may be largest, of all ranks."""

    in_flight: Rows  # [ranks, moments, chunks] micro-batches in flight
    backward: NDArray[np.bool_]  # [moments] True at starts of backward passes, which come first; then come losses
    loss: NDArray[np.bool_]  # [ranks, moments] True at the losses of a rank
    order: NDArray[np.intp]  # [ranks, moments] number of each moment: backward passes in their order, then losses
    chunks: Column  # [forward passes] chunk of each forward pass of a rank
    numbers: Column  # [forward passes] its micro-batch

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of the moments, by their number."""
        vpp, labels = self.in_flight.shape[2], [f"micro-batch {i}" for i in self.numbers]
        if vpp > 1:  # backward passes take the chunks in reverse
            labels = [
                f"{label}, model chunk {vpp - 1 - chunk}" for label, chunk in zip(labels, self.chunks, strict=True)
            ]
        backward = [f"start of the backward pass of {label}" for label in labels[1:]]
        losses = [f"loss of micro-batch {i}" for i in self.numbers[self.chunks == vpp - 1]]
        return f"start of the first backward pass ({labels[0]})", *backward, *losses


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


def pass_order(rank: int, pp: int, vpp: int, microbatches: int, group: int = 0) -> list[int]:
    """Return the passes of a rank in its order: warm-up, steady 1F1B phase, cool-down.

    A pass is a number, visit * microbatches + micro-batch.
    """
    m, first = microbatches, int(warmup(rank, pp, vpp, microbatches, group))
    forward = _forward_passes(pp, vpp, m, group) + rank * m
    backward = forward + ((vpp + 1) * pp - 1 - 2 * rank) * m
    order = np.empty(2 * len(forward), dtype=np.int64)
    last = len(order) - first
    order[:first], order[first:last:2] = forward[:first], forward[first:]
    order[first + 1 : last : 2], order[last:] = backward[: len(forward) - first], backward[len(forward) - first :]
    passes: list[int] = order.tolist()
    return passes


@lru_cache(maxsize=16)
def _forward_passes(pp: int, vpp: int, microbatches: int, group: int) -> Column:
    """Return the forward passes of rank 0 in their order: group by group, in each chunk by chunk.

    Source: megatron-core 0.16.1, schedules.py:798.
    """
    size, chunks = group or pp, microbatches * pp * np.arange(vpp)[:, None]
    groups = [np.arange(first, min(first + size, microbatches)) for first in range(0, microbatches, size)]
    return np.concatenate([(chunks + each).ravel() for each in groups])


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
    chunks, numbers = np.divmod(_forward_passes(1, vpp, few, size), few)
    numbers[numbers >= few - few % size] += microbatches - few  # the last group is that of all micro-batches
    begun = np.zeros((len(chunks) + 1, vpp), dtype=np.int64)  # before each forward pass
    np.cumsum(chunks[:, None] == np.arange(vpp), axis=0, out=begun[1:])
    ended, count = begun[:, ::-1], len(chunks)  # ended: before each backward pass; they take the chunks in reverse
    first = warmup(np.arange(pp), pp, vpp, few, size)
    # Backward passes right after a forward pass, those of one rank after those of the other.
    counts = np.maximum(count - first, 1)
    rank = np.repeat(np.arange(pp), counts)
    passes = np.arange(len(rank)) - (np.cumsum(counts) - counts)[rank]
    before = begun[np.minimum(first[rank] + passes + 1, count)] - ended[passes]
    distinct = alike(rank, *before.T)[0]
    own = np.bincount(rank[distinct])[:, None]  # distinct sets of each rank
    backwards, nth = int(own.max()), np.arange(own.max())
    each = distinct[np.cumsum(own)[:, None] - own + np.where(nth < own, nth, 0)]
    losses = np.flatnonzero(chunks == vpp - 1)
    at_loss = begun[losses + 1] - ended[np.maximum(0, losses - first[-1])]
    of_loss = np.sort(alike(*at_loss.T)[0])
    in_flight = np.zeros((pp, backwards + len(of_loss), vpp))
    order = np.zeros(in_flight.shape[:2], dtype=np.intp)
    in_flight[:, :backwards], order[:, :backwards] = before[each], passes[each]
    in_flight[-1, backwards:], order[:, backwards:] = at_loss[of_loss], count + of_loss
    backward = np.arange(in_flight.shape[1]) < backwards
    return Moments(in_flight, backward, ~backward & (np.arange(pp) == pp - 1)[:, None], order, chunks, numbers)


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
    m, stages = microbatches, len(forward)
    sends = [*transfer[: stages - 1], 0.0, *reversed(transfer[: stages - 1]), 0.0]
    # By pass: its seconds, those of its send, and when its input arrives; before, the rank that waits for it, or None.
    seconds, sending = (np.repeat(each, m).tolist() for each in ([*forward, *reversed(backward)], sends))
    arrived: list[Any] = [0.0] * m + [None] * (2 * stages * m)
    starts: list[list[float]] = [[] for _ in range(pp)]
    free, ready, blocking = [0.0] * pp, [*range(pp)], stages == pp
    orders = [iter(pass_order(rank, pp, stages // pp, m, group)) for rank in range(pp)]
    following = [next(order) for order in orders]
    while ready:
        rank = ready.pop()
        now, order, one, begin = free[rank], orders[rank], following[rank], starts[rank].append
        while (came := arrived[one]) is not None:
            if came > now:
                now = came
            begin(now)
            now += seconds[one]
            after = one + m
            waiting, arrived[after] = arrived[after], now + sending[one]
            if blocking:
                now = arrived[after]
            if waiting is not None:
                ready.append(waiting)
            if (one := next(order, -1)) < 0:
                break
        else:
            arrived[one], following[rank] = rank, one
        free[rank] = now
    assert all(len(each) == 2 * m * stages // pp for each in starts), "a schedule in which ranks wait forever"
    return starts
