"""Memory of each pipeline rank over one step.

`memory_tracks(priced)` gives the terms of each rank's memory, `memory_levels` its bytes at every event of a timeline;
the largest is the peak of the plan. The page's scripts draw the same terms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from attrs import frozen

from megaloom.planner.cost import communication, memory
from megaloom.planner.pipeline.timeline import Event

from .price import Priced


class Slice(NamedTuple):
    """An activity of a pipeline rank, with its start and end in seconds."""

    name: str
    start: float
    end: float


@frozen
class MemoryTrack:
    """The bytes of one pipeline rank, by how long they stay: the whole step, one pass, one micro-batch."""

    bare: int  # state, and what no tensor holds
    library: int  # libraries and receive buffers, for the whole step
    workspace: int  # transient, during a backward pass
    loss: int  # transient, from the end of the last stage's forward pass to its backward pass
    stepping: int  # transient, during the optimizer's step, or at the end of the last backward pass
    saved: tuple[int, ...]  # by chunk, from the start of a forward pass to the end of its backward pass

    def level(self, saved: int, transient: int) -> int:
        """Return the bytes of the rank with these saved activations and transient bytes."""
        return int(memory.rank_memory(self.bare, saved, 1, transient + self.library))


def memory_tracks(priced: Priced) -> tuple[MemoryTrack, ...]:
    """Return the memory terms of each pipeline rank."""
    placed, job, x = priced.partition, priced.partition.problem.job, priced.layout
    out, reserved = [], communication.reserved_bytes(x, job.cluster, job.profile)
    for rank, groups in enumerate(placed.copy_groups.tolist()):
        mine = placed.stages[rank :: x.pp]
        params, experts = sum(s.params for s in mine), sum(s.expert_params for s in mine)
        fixed, copies = sum(s.frozen_params for s in mine), sum(s.narrow_copies for s in mine)
        state = memory.rank_state(params, experts, x, job, fixed, copies)
        out.append(
            MemoryTrack(
                bare=state.total + reserved + groups * job.cluster.outer.group_nbytes,
                library=max(s.library for s in mine),
                workspace=max(s.workspace for s in mine),
                loss=mine[-1].loss,
                stepping=state.step + max(s.ending for s in mine),
                saved=tuple(s.saved for s in mine),
            )
        )
    return tuple(out)


def memory_levels(
    track: MemoryTrack, events: Iterable[Event], after: Iterable[Slice], pp: int
) -> Iterator[tuple[float, int]]:
    """Yield when the memory of a rank changes, and its bytes from then on. after: its activities after the events."""
    saved = 0
    yield 0.0, track.level(0, 0)
    for (stage, _, backward), start, end in events:
        chunk = stage // pp
        if backward:
            yield start, track.level(saved, track.workspace)
            saved -= track.saved[chunk]
        else:
            saved += track.saved[chunk]
            yield start, track.level(saved, 0)
        at_loss = not backward and chunk + 1 == len(track.saved)
        yield end, track.level(saved, track.loss if at_loss else 0)
    for name, start, end in after:
        if name == "optimizer":
            yield start, track.level(0, track.stepping)
            yield end, track.level(0, 0)
