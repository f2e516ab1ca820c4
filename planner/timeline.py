"""megatron-core's pipeline schedules, replayed event by event.

Protocol: `order` says what a pipeline rank does, step after step; `replay` gives each step a start and an end, once its
input has arrived and its rank is free; `held` says what a rank keeps meanwhile. Stages are numbered in model order:
stage s is chunk s // pp of rank s % pp. All times are in seconds, all functions pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from attrs import frozen


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

    @property
    def events(self) -> tuple[tuple[Event, ...], ...]:
        """Every rank's steps with their place in time."""
        pp, vpp = len(self.starts), len(self.forward) // len(self.starts)
        return tuple(
            tuple(
                Event(step, start, start + (self.backward if step.backward else self.forward)[step.stage])
                for step, start in zip(order(rank, pp, vpp, self.microbatches), starts, strict=True)
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


def warmup(rank: int, pp: int, vpp: int, microbatches: int) -> int:
    """How many forward steps `rank` runs before its first backward step follows one.

    Source: megatron-core 0.16.1, schedules.py:738, with micro-batch groups of pp as everywhere here.
    """
    ahead = pp - rank - 1
    return min(ahead if vpp == 1 else 2 * ahead + (vpp - 1) * pp, microbatches * vpp)


def table(pp: int, vpp: int, microbatches: int) -> tuple[tuple[int, int], ...]:
    """The (micro-batch, chunk) of each forward step of any rank: groups of pp micro-batches, chunk by chunk.

    Source: megatron-core 0.16.1, schedules.py:798.
    """
    if vpp == 1:
        return tuple((i, 0) for i in range(microbatches))
    groups = (range(first, min(first + pp, microbatches)) for first in range(0, microbatches, pp))
    return tuple((i, chunk) for group in groups for chunk in range(vpp) for i in group)


def order(rank: int, pp: int, vpp: int, microbatches: int) -> tuple[Step, ...]:
    """The steps of `rank`: warm-up forwards, then forward and backward in turn, then the backwards left over."""
    last = pp * vpp - 1
    return tuple(
        Step(leg, i, False) if leg <= last else Step(2 * last + 1 - leg, i, True)
        for leg, i in legs(rank, pp, vpp, microbatches)
    )


@lru_cache(maxsize=1024)
def legs(rank: int, pp: int, vpp: int, microbatches: int) -> list[tuple[int, int]]:
    """The same as (leg, micro-batch). A micro-batch goes through all stages and back: that many legs, twice."""
    rows = table(pp, vpp, microbatches)
    forward = [(chunk * pp + rank, i) for i, chunk in rows]
    backward = [((vpp + chunk + 1) * pp - 1 - rank, i) for i, chunk in rows]
    ahead = warmup(rank, pp, vpp, microbatches)
    steady = [step for pair in zip(forward[ahead:], backward, strict=False) for step in pair]
    return forward[:ahead] + steady + backward[len(forward) - ahead :]


@lru_cache(maxsize=4096)
def held(rank: int, pp: int, vpp: int, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """The fullest sets of forwards that `rank` ever has in flight: how many of each chunk, no set within another.

    They are those before each backward that follows a forward, and repeat with every group of micro-batches once the
    warm-up, of two groups at the most, is over.
    """
    few = min(microbatches, 4 * pp)
    chunks = [chunk for _, chunk in table(pp, vpp, few)]
    ahead = warmup(rank, pp, vpp, few)
    now = [chunks[:ahead].count(chunk) for chunk in range(vpp)]
    if ahead == len(chunks):
        return (tuple(now),)
    seen = set()
    for new, old in zip(chunks[ahead:], chunks, strict=False):
        now[new] += 1
        seen.add(tuple(now))
        now[vpp - 1 - old] -= 1
    return tuple(sorted(seen))


def replay(
    forward: Sequence[float], backward: Sequence[float], transfer: Sequence[float], pp: int, microbatches: int
) -> Timeline:
    """Each step starts as soon as its rank is free and its input is there, in the rank's order.

    `forward` and `backward` are seconds of one micro-batch by stage, `transfer[s]` those of what passes between
    stages s and s + 1, either way. One chunk a rank: a rank sends before it goes on (megatron-core's blocking
    exchange); several: it sends while it computes (`overlap_p2p_comm`, the only setting that is right there).
    """
    stages = len(forward)
    vpp = stages // pp
    seconds = (*forward, *reversed(backward))
    hops = (*transfer[: stages - 1], 0.0, *reversed(transfer[: stages - 1]), 0.0)
    ranks = [*range(pp)] * vpp + [*reversed(range(pp))] * vpp + [0]
    orders = [legs(rank, pp, vpp, microbatches) for rank in range(pp)]
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
    return Timeline(
        microbatches=microbatches,
        starts=tuple(map(tuple, starts)),
        forward=tuple(forward),
        backward=tuple(backward),
        transfer=tuple(transfer[: stages - 1]),
        busy=tuple(microbatches * (sum(forward[r::pp]) + sum(backward[r::pp])) for r in range(pp)),
        sending=tuple(
            microbatches * sum(transfer[max(0, r - 1) : min(r + 1, stages - 1)]) if vpp == 1 else 0.0 for r in range(pp)
        ),
    )


def bound(seconds: Sequence[float], pp: int, microbatches: int) -> float:
    """No schedule of these stages' seconds (forward and backward) ends sooner.

    The slowest rank does all its micro-batches; before and after, one of them passes the ranks ahead of it.
    """
    first = 0.0
    slowest = 0.0
    for rank in range(pp):
        slowest = max(slowest, first + microbatches * sum(seconds[rank::pp]))
        first += seconds[rank]
    return max(slowest, sum(seconds))
