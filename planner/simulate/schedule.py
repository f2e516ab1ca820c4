"""megatron-core's pipeline schedules, replayed event by event.

Protocol: `order` says what a pipeline rank does, step after step; `replay` gives each step a start and an end, once its
input has arrived and its rank is free; `held` says what a rank keeps meanwhile. Stages are numbered in model order:
stage s is chunk s // pp of rank s % pp. All times are in seconds, all functions pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

FEW = 4  # groups of micro-batches after which a schedule repeats itself
EXACT = 1e-13  # of a time: seconds that are the same, summed in another order


class Step(NamedTuple):
    """One micro-batch through one stage, one way."""

    stage: int
    microbatch: int
    backward: bool


class Event(NamedTuple):
    """A step with its place in time."""

    step: Step
    start: float
    end: float


@frozen
class Timeline:
    """What each pipeline rank does when, for one optimizer step's micro-batches."""

    microbatches: int
    starts: tuple[tuple[float, ...], ...]  # by rank, of each of its steps in `order`
    forward: tuple[float, ...]  # seconds by stage
    backward: tuple[float, ...]
    busy: tuple[float, ...]  # by rank: computing
    sending: tuple[float, ...]  # by rank: held up by its own sends
    transfer: tuple[float, ...]  # seconds of what passes from each stage to the next, either way
    group: int = 0  # micro-batches that a chunk runs before the next one does; 0: as many as there are ranks

    @property
    def events(self) -> tuple[tuple[Event, ...], ...]:
        """Every rank's steps with their place in time."""
        pp, vpp = len(self.starts), len(self.forward) // len(self.starts)
        return tuple(
            tuple(
                Event(step, start, start + (self.backward if step.backward else self.forward)[step.stage])
                for step, start in zip(rank_order(rank, pp, vpp, self.microbatches, self.group), starts, strict=True)
            )
            for rank, starts in enumerate(self.starts)
        )

    @property
    def ends(self) -> tuple[float, ...]:
        """When each rank ends its last step, which is backward through its first chunk."""
        return tuple(starts[-1] + self.backward[rank] for rank, starts in enumerate(self.starts))

    @property
    def makespan(self) -> float:
        """When the last rank ends its last step."""
        return max(self.ends)

    @property
    def bubble(self) -> float:
        """The share of the makespan in which the average rank waits: neither computes nor sends."""
        span = self.makespan * len(self.busy)
        return 1 - (sum(self.busy) + sum(self.sending)) / span if span else 0.0


def warmup(rank: int, pp: int, vpp: int, microbatches: int, group: int = 0) -> int:
    """How many forward steps `rank` runs before its first backward step follows one.

    group: micro-batches that a chunk runs before the next one does, here and below; 0 means pp.
    """
    most: int = warmup_limit(pp - rank - 1, vpp, group or pp)
    return min(most, microbatches * vpp)


def warmup_limit(after: Any, vpp: int, group: Any) -> Any:
    """The same of a rank with so many ranks after it, if there are micro-batches enough: of one, or of many in columns.

    Source: megatron-core 0.16.1, schedules.py:738.
    """
    return after if vpp == 1 else 2 * after + (vpp - 1) * group


def forward_order(pp: int, vpp: int, microbatches: int, group: int = 0) -> tuple[tuple[int, int], ...]:
    """The (micro-batch, chunk) of each forward step of any rank: group after group, in each chunk by chunk.

    Source: megatron-core 0.16.1, schedules.py:798.
    """
    if vpp == 1:
        return tuple((i, 0) for i in range(microbatches))
    size = group or pp
    groups = (range(first, min(first + size, microbatches)) for first in range(0, microbatches, size))
    return tuple((i, chunk) for group in groups for chunk in range(vpp) for i in group)


def rank_order(rank: int, pp: int, vpp: int, microbatches: int, group: int = 0) -> tuple[Step, ...]:
    """The steps of `rank`: warm-up forwards, then forward and backward in turn, then the backwards left over."""
    last = pp * vpp - 1
    return tuple(
        Step(leg, i, False) if leg <= last else Step(2 * last + 1 - leg, i, True)
        for leg, i in hop_order(rank, pp, vpp, microbatches, group)
    )


@lru_cache(maxsize=256)
def hop_order(rank: int, pp: int, vpp: int, microbatches: int, group: int = 0) -> list[tuple[int, int]]:
    """The same as (leg, micro-batch). A micro-batch goes through all stages and back: that many legs, twice."""
    rows = forward_order(pp, vpp, microbatches, group)
    forward = [(chunk * pp + rank, i) for i, chunk in rows]
    backward = [((vpp + chunk + 1) * pp - 1 - rank, i) for i, chunk in rows]
    ahead = warmup(rank, pp, vpp, microbatches, group)
    steady = [step for pair in zip(forward[ahead:], backward, strict=False) for step in pair]
    return forward[:ahead] + steady + backward[len(forward) - ahead :]


Flight = tuple[int, ...]  # of each chunk, how many forwards are in flight


def in_flight_sets(rank: int, pp: int, vpp: int, microbatches: int, group: int = 0) -> tuple[Flight, ...]:
    """The fullest sets of forwards that `rank` ever has in flight: how many of each chunk, no set within another.

    They are those before each backward that follows a forward.
    """
    return tuple(sorted(backward_moments(rank, pp, vpp, microbatches, group)))


@lru_cache(maxsize=4096)
def backward_moments(rank: int, pp: int, vpp: int, microbatches: int, group: int = 0) -> dict[Flight, tuple[int, int]]:
    """The same sets, each with the (micro-batch, chunk) of the first backward that it is in flight at.

    Once the warm-up, of two groups at the most, is over, they repeat with every group of micro-batches; the last group
    may be a smaller one.
    """
    few, rows, ahead = _begun(rank, pp, vpp, microbatches, group)
    now = [sum(chunk == c for _, chunk in rows[:ahead]) for c in range(vpp)]
    if ahead == len(rows):
        return {tuple(now): (rows[0][0], vpp - 1)}
    seen: dict[Flight, tuple[int, int]] = {}
    for (_, new), (i, old) in zip(rows[ahead:], rows, strict=False):
        now[new] += 1
        seen.setdefault(tuple(now), (_among(i, few, microbatches, group or pp), vpp - 1 - old))
        now[vpp - 1 - old] -= 1
    return seen


@lru_cache(maxsize=4096)
def loss_moments(pp: int, vpp: int, microbatches: int, group: int = 0) -> dict[Flight, int]:
    """What the last rank has in flight as a micro-batch reaches the loss, each set with the first such micro-batch."""
    few, rows, ahead = _begun(pp - 1, pp, vpp, microbatches, group)
    now, seen = [0] * vpp, dict[Flight, int]()
    for k, (i, new) in enumerate(rows):
        now[new] += 1
        if new == vpp - 1:
            seen.setdefault(tuple(now), _among(i, few, microbatches, group or pp))
        if k >= ahead:
            now[vpp - 1 - rows[k - ahead][1]] -= 1
    return seen


def _begun(rank: int, pp: int, vpp: int, microbatches: int, group: int) -> tuple[int, Sequence[tuple[int, int]], int]:
    """As many micro-batches as show every set of forwards, the forwards of these, and how many are the warm-up."""
    size = group or pp
    few = min(microbatches, FEW * size + microbatches % size)
    return few, forward_order(pp, vpp, few, group), warmup(rank, pp, vpp, few, group)


def _among(i: int, few: int, microbatches: int, size: int) -> int:
    """Which of all micro-batches is the i-th of these few, whose last group is the last of all."""
    return i if i < few - few % size else i + microbatches - few


def in_flight_table(pp: int, vpp: int, microbatches: int, group: int = 0) -> NDArray[np.int64]:
    """The same of every rank: [ranks, sets, chunks]; where a rank has fewer sets, the first of them again."""
    size = (group or pp) if vpp > 1 else pp
    return _in_flight_table(pp, vpp, min(microbatches, FEW * size + microbatches % size), group)


@lru_cache(maxsize=1024)
def _in_flight_table(pp: int, vpp: int, microbatches: int, group: int) -> NDArray[np.int64]:
    every = [in_flight_sets(rank, pp, vpp, microbatches, group) for rank in range(pp)]
    most = max(map(len, every))
    return np.array([[*sets, *[sets[0]] * (most - len(sets))] for sets in every], dtype=np.int64)


@lru_cache(maxsize=1024)
def in_flight_moments(pp: int, vpp: int, microbatches: int, group: int = 0) -> tuple[NDArray[np.float64], int]:
    """`flights` of every rank, then `losses`, which only the last has: [ranks, sets, chunks]; how many come first."""
    backs, last = in_flight_table(pp, vpp, microbatches, group), loss_moments(pp, vpp, microbatches, group)
    reached = np.zeros((pp, len(last), vpp))
    reached[-1] = list(last)
    return np.hstack([backs, reached]), backs.shape[1]


def replay(
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float],
    pp: int,
    microbatches: int,
    group: int = 0,
) -> Timeline:
    """Each step starts as soon as its rank is free and its input is there, in the rank's order.

    `forward` and `backward` are seconds of one micro-batch by stage, `transfer[s]` those of what passes between
    stages s and s + 1, either way. One chunk a rank: a rank sends before it goes on (megatron-core's blocking
    exchange); several: it sends while it computes (`overlap_p2p_comm`, the only setting that is right there).
    """
    stages = len(forward)
    starts = _starts(forward, backward, transfer, pp, microbatches, group)
    return Timeline(
        microbatches=microbatches,
        starts=tuple(map(tuple, starts)),
        forward=tuple(forward),
        backward=tuple(backward),
        busy=tuple(microbatches * (sum(forward[r::pp]) + sum(backward[r::pp])) for r in range(pp)),
        sending=send_seconds(transfer[: stages - 1], pp, microbatches),
        transfer=tuple(transfer[: stages - 1]),
        group=group,
    )


def send_seconds(transfer: Sequence[float], pp: int, microbatches: int) -> tuple[float, ...]:
    """How long each rank is held up by its own sends: with several chunks, not at all."""
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
    """When each rank ends its last step: what `replay` says, sooner.

    Steps depend on sums and maxima alone, so that once all steps of two groups come a constant later than those of the
    groups before, every later group does: those between are left out.
    """
    vpp = len(forward) // pp
    period = 1 if vpp == 1 else group or pp
    rest = microbatches % period
    few = rest + period * (-(-warmup(0, pp, vpp, microbatches, group) // (vpp * period)) + WINDOW * SETTLED)
    times = (forward, backward, transfer, pp)
    while few < microbatches * WORTH:
        starts = _starts(*times, few, group)
        late = _late(starts, [warmup(r, pp, vpp, few, group) for r in range(pp)], vpp * (few - rest), vpp * period)
        if late is not None:
            more = late * ((microbatches - few) // period)
            return tuple(begun[-1] + backward[rank] + more for rank, begun in enumerate(starts))
        few += period * (-(-3 * few // period))
    return tuple(b[-1] + backward[rank] for rank, b in enumerate(_starts(*times, microbatches, group)))


WINDOW = 4  # periods that must be alike: two, and as many again before
SETTLED = 2  # times that many before it is looked
WORTH = 0.7  # of all micro-batches: more are better replayed


def _late(starts: Sequence[Sequence[float]], ahead: Sequence[int], forwards: int, period: int) -> float | None:
    """How much later each group's steps start than those of the group before, if all do by the same seconds.

    It is asked of the last groups of the steady phase, of which the first `forwards` forwards are full ones.
    """
    late: float | None = None
    for begun, first in zip(starts, ahead, strict=True):
        stop = first + 2 * (forwards - first)
        recent = np.array(begun[max(first, stop - WINDOW * 2 * period) : stop])
        if len(recent) < 6 * period:
            return None
        apart = recent[2 * period :] - recent[: -2 * period]
        late = float(apart[0]) if late is None else late
        if np.abs(apart - late).max() > EXACT * recent[-1]:
            return None
    return late


def _starts(
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float],
    pp: int,
    microbatches: int,
    group: int,
) -> list[list[float]]:
    """When each step of each rank starts."""
    stages = len(forward)
    vpp = stages // pp
    seconds = (*forward, *reversed(backward))
    hops = (*transfer[: stages - 1], 0.0, *reversed(transfer[: stages - 1]), 0.0)
    ranks = [*range(pp)] * vpp + [*reversed(range(pp))] * vpp + [0]
    orders = [hop_order(rank, pp, vpp, microbatches, group) for rank in range(pp)]
    arrived: list[list[float | None]] = [[None] * microbatches for _ in range(2 * stages + 1)]
    arrived[0] = [0.0] * microbatches
    starts: list[list[float]] = [[] for _ in orders]
    free = [0.0] * pp
    ready = list(range(pp))
    waiting: list[tuple[int, int] | None] = [None] * pp  # for the input of this step
    while ready:
        rank = ready.pop()
        steps, begun, now = orders[rank], starts[rank], free[rank]
        for k in range(len(begun), len(steps)):
            leg, i = steps[k]
            came = arrived[leg][i]
            if came is None:
                waiting[rank] = steps[k]
                break
            start = came if came > now else now
            begun.append(start)
            now = start + seconds[leg]
            arrived[leg + 1][i] = sent = now + hops[leg]
            if vpp == 1:
                now = sent
            after = ranks[leg + 1]
            if waiting[after] and waiting[after] == (leg + 1, i):
                waiting[after] = None
                ready.append(after)
        free[rank] = now
    assert all(len(s) == len(o) for s, o in zip(starts, orders, strict=True)), "a schedule in which ranks wait forever"
    return starts
