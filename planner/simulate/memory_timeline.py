"""The memory of each pipeline rank, moment after moment of a step.

Protocol: `tracks(priced)` says what each rank holds whatever it does and what comes and goes; `levels` is its memory
over a timeline's events, of which the highest is the peak of the plan. The page's scripts draw the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from attrs import frozen

from megaloom.planner.cost import memory

from .prediction import Priced
from .schedule import Event


class Slice(NamedTuple):
    """What a pipeline rank is busy with from one moment to another, in seconds."""

    name: str
    start: float
    end: float


@frozen
class Track:
    """What one pipeline rank holds, in bytes."""

    bare: int  # without what passes through the allocator: weights, gradients, optimizer, what no tensor holds
    library: int  # throughout, for libraries and for what passes between ranks
    workspace: int  # within a backward
    loss: int  # from the end of the last stage's forward to its backward
    stepping: int  # while the optimizer steps
    saved: tuple[int, ...]  # by chunk, from the start of a forward to the end of the backward

    def level(self, comes: int) -> int:
        """All that is held when so much is there that comes and goes."""
        passing = comes + self.library
        return self.bare + passing + int(memory.ALLOCATOR * passing)


def tracks(priced: Priced) -> tuple[Track, ...]:
    """Of each pipeline rank."""
    fit, parts, x = priced.partition.problem, priced.partition.parts, priced.layout
    out = []
    for rank in range(x.pp):
        mine = parts[rank :: x.pp]
        params, experts = sum(p.params for p in mine), sum(p.expert_params for p in mine)
        static = memory.state_bytes(params, experts, x, fit.workload.precision, fit.profile)
        out.append(
            Track(
                bare=sum(static.values()) + memory.reserved_bytes(x, fit.cluster, fit.profile),
                library=max(p.library for p in mine),
                workspace=fit.table.workspace,
                loss=mine[-1].loss,
                stepping=memory.optimizer_step_bytes(params, experts, x, fit.profile),
                saved=tuple(p.saved for p in mine),
            )
        )
    return tuple(out)


def levels(track: Track, events: Iterable[Event], after: Iterable[Slice], pp: int) -> Iterator[tuple[float, int]]:
    """When the memory of a rank with these events, and what it does after them, changes, and to how many bytes."""
    kept = 0
    yield 0.0, track.level(0)
    for (stage, _, backward), start, end in events:
        chunk = stage // pp
        if backward:
            yield start, track.level(kept + track.workspace)
            kept -= track.saved[chunk]
        else:
            kept += track.saved[chunk]
            yield start, track.level(kept)
        yield end, track.level(kept + (0 if backward or chunk + 1 < len(track.saved) else track.loss))
    for name, start, end in after:
        if name == "optimizer":
            yield start, track.level(track.stepping)
            yield end, track.level(0)
