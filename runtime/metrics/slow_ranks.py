"""Slow ranks: ranks whose passes take much longer than those of the other ranks of their pipeline stage.

All ranks of a stage have equal work, but for the tokens of experts. A rank waits for its tensor-parallel ranks inside
its passes, so that these are slow together.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from statistics import median_low

from attrs import define, field, frozen

from megaloom.runtime.launch.agreement import gathered

from .step_times import BACKWARD, COMPUTE, FORWARD, Unit

FIRST_STEP = 3
"""First step of a run that is compared: those before it allocate memory and compile."""

STEPS, EVERY = 3, 100
"""Steps that are compared together, and steps from one comparison to the next."""

SLOW = 1.5
"""A rank is slow if its passes take more than this many times the median of its stage, in each of these steps."""


@frozen
class RankTimes:
    """Seconds that the passes of a rank take in each of some steps."""

    rank: int
    host: str
    pipeline_rank: int
    seconds: tuple[float, ...]


@define
class SlowRanks:
    """Compares ranks in a few steps now and then. All ranks take the same decisions, by step counts."""

    pipeline_rank: int
    seconds: list[float] = field(factory=list, init=False)

    def compares(self, step: int) -> bool:
        """Return whether a step of this run, counted from 1, is compared."""
        return 0 <= (step - FIRST_STEP) % EVERY < STEPS and step >= FIRST_STEP

    def take(self, units: Iterable[Unit]) -> str | None:
        """Take the units of a step that is compared. After the last one, return a line that names slow ranks."""
        self.seconds.append(sum(u.seconds for u in units if u.kind == COMPUTE and u.name in (FORWARD, BACKWARD)))
        if len(self.seconds) < STEPS:
            return None
        own, self.seconds = (socket.gethostname(), self.pipeline_rank, tuple(self.seconds)), []
        return slow_line([RankTimes(rank, *times) for rank, times in enumerate(gathered(own))])


def slow_line(ranks: Sequence[RankTimes]) -> str | None:
    """Return a line that names slow ranks with their hosts; None if there are none."""
    found = [f"rank {r.rank} ({r.host}) {ratio:.1f}x" for r in ranks if (ratio := _ratio(r, ranks)) > SLOW]
    return f"slow ranks (forward and backward time / median of their stage): {', '.join(found)}" if found else None


def _ratio(rank: RankTimes, ranks: Sequence[RankTimes]) -> float:
    """Return how many times longer than the median of its stage a rank takes, in the step where that is least."""
    others = zip(*(r.seconds for r in ranks if r.pipeline_rank == rank.pipeline_rank), strict=True)
    return min(own / median_low(stage) for own, stage in zip(rank.seconds, others, strict=True))
