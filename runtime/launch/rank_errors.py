"""Errors of ranks: the one that is raised, and words for ranks that died, hang or do not return."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from .rank import TIMED_OUT, Failure


class RankError(RuntimeError):
    """A failed rank: its number, its traceback or how its process ended, and the signal that ended it, if one did."""

    def __init__(self, rank: int, text: str, signal: int | None = None) -> None:
        super().__init__(f"rank {rank} {text}")
        self.rank, self.text, self.signal = rank, text, signal

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.text, self.signal)


def names_of(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 1 and 2", or "ranks 1, 2 and 4"."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def ending_of(code: int) -> str:
    """Return how a process ended that has written no outcome."""
    if code >= 0:
        return f"exited with status {code} without an error message"
    killed = f"was killed ({signal.Signals(-code).name})"
    if code == -signal.SIGKILL:
        return killed + ", probably by the kernel because host memory ran out"
    return killed


def only_waited(failures: Sequence[Failure], earliest: float) -> bool:
    """Return whether all failures are of ranks that waited too long for another one, in a collective.

    earliest: the time at which a collective can have timed out. A connection may time out before.
    """
    return all(f.doubt and f.when >= earliest and TIMED_OUT.search(f.text) for f in failures)


def hang_text(ranks: Sequence[int], timeout: timedelta, stack: str) -> str:
    """Return the text of the error for ranks for which the others waited until the timeout."""
    where = f"; stack:\n{stack}" if stack else ", and its process does not answer: it may be stopped"
    others = f" ({names_of(ranks)} hang)" if len(ranks) > 1 else ""
    waited = f"{timeout / timedelta(minutes=1):g} min (--distributed-timeout-minutes)"
    return f"hangs{others}: the other ranks have waited {waited} for it{where}"
