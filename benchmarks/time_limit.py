"""Time limit on work of a rank that may hang in a collective."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def process_time_limit(seconds: float, record: Callable[[], object]) -> Iterator[None]:
    """Inside the context, call `record` and end this process after so many seconds.

    The main thread may wait in a collective, which no exception ends.
    """

    def end() -> None:
        record()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
