"""Signals that ask a training loop to save or to stop: collected, and looked at between two batches."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from megaloom.runtime.launch.stop_signals import STOPPING, SignalWords, handled, say

WHILE_TRAINING = SignalWords(
    stop="the run stops after this step or batch, and saves; a second signal ends it at once",
    save="the run saves after this step, and goes on",
)


@contextmanager
def collected_signals(signals: list[int]) -> Iterator[None]:
    """Collect signals in a list until the block ends. Before and after it, a rank ends at once.

    A rank that `launcher` has started gets SIGTERM and SIGUSR2 from its parent, which has said that they were heard.
    One that torchrun or srun has started gets all of them itself; the first rank says so.
    """
    forked = multiprocessing.parent_process() is not None
    numbers = (signal.SIGTERM, signal.SIGUSR2) if forked else (*STOPPING, signal.SIGUSR2)

    def collect(number: int) -> None:
        if not forked and not int(os.environ.get("RANK", 0)):
            say(number, WHILE_TRAINING.save if number == signal.SIGUSR2 else WHILE_TRAINING.stop)
        signals.append(number)

    with handled(numbers, collect):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR2,))  # one that came while this rank started
        yield
