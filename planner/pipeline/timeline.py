"""The timeline of one step: what each pipeline rank does, and when. Reports and traces draw it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attrs import frozen

from .schedules import pass_order, start_times


class Pass(NamedTuple):
    """One micro-batch through one stage, forward or backward."""

    stage: int
    microbatch: int
    backward: bool


class Event(NamedTuple):
    """A pass with its start and end in seconds."""

    step: Pass
    start: float
    end: float


@frozen
class Timeline:
    """Start times of all passes of one optimizer step."""

    microbatches: int
    starts: tuple[tuple[float, ...], ...]  # by rank, of each of its passes in `rank_order`
    forward: tuple[float, ...]  # seconds by stage
    backward: tuple[float, ...]
    transfer: tuple[float, ...]  # seconds of the p2p send from each stage to the next, either way
    group: int = 0  # microbatch group; 0: as many as there are ranks

    @property
    def events(self) -> tuple[tuple[Event, ...], ...]:
        """Return the events of every rank, in order."""
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
        """Return when each rank ends its last pass, which is backward through its first chunk."""
        return tuple(starts[-1] + self.backward[rank] for rank, starts in enumerate(self.starts))

    @property
    def makespan(self) -> float:
        """Return when the last rank ends its last pass."""
        return max(self.ends)


def rank_order(rank: int, pp: int, vpp: int, microbatches: int, group: int = 0) -> tuple[Pass, ...]:
    """Return the passes of `rank` in order."""
    last = pp * vpp - 1
    visits = (divmod(one, microbatches) for one in pass_order(rank, pp, vpp, microbatches, group))
    return tuple(Pass(visit, i, False) if visit <= last else Pass(2 * last + 1 - visit, i, True) for visit, i in visits)


def simulate_timeline(
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float],
    pp: int,
    microbatches: int,
    group: int = 0,
) -> Timeline:
    """Return the timeline of one step. Arguments are those of `schedules.start_times`."""
    return Timeline(
        microbatches=microbatches,
        starts=tuple(map(tuple, start_times(forward, backward, transfer, pp, microbatches, group))),
        forward=tuple(forward),
        backward=tuple(backward),
        transfer=tuple(transfer[: len(forward) - 1]),
        group=group,
    )
