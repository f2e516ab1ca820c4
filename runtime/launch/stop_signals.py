"""Signals that end a command or ask it to save: a line says at once which was heard.

`until_stopped` runs a command as a whole, from its start: the imports and the search take seconds. While ranks run,
`launcher` and the training loop have handlers of their own. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from attrs import frozen

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that end a command; a run saves before it ends."""

EXIT_CODE = 128  # of a command that a signal has ended, plus the signal's number
NOT_TRAINING = "ignored: it saves a checkpoint, and training has not begun"


@frozen
class SignalWords:
    """Words that are said at once to signals that are heard while ranks run."""

    stop: str = "ending the ranks"
    second: str = "ending at once"  # to a second one
    save: str = "ignored: nothing is trained here"  # to SIGUSR2


def say(number: int, then: str) -> None:
    """Write to stderr that a signal was heard and what follows. Safe in a signal handler, unlike print."""
    line = f"megaloom: {signal.Signals(number).name} heard; {then}\n"
    with contextlib.suppress(OSError):  # nobody reads it any more
        os.write(2, (f"\r\x1b[K{line}" if os.isatty(2) else line).encode())  # over the ^C of a terminal


@contextlib.contextmanager
def handled(numbers: tuple[signal.Signals, ...], handler: Callable[[int], None]) -> Iterator[None]:
    """Call `handler` with the number of each of these signals, until the block ends. Ignored ones stay ignored.

    A forked process that inherits the handler gets the default action instead. Only the main thread may set handlers;
    on another one nothing changes.
    """
    owner, before = os.getpid(), {}

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            handler(number)
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored, as under nohup
                before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier if earlier is not None else signal.SIG_DFL)


def until_stopped(command: Callable[[], int]) -> int:
    """Run a command, and return its exit code. The first signal of STOPPING ends it, and is said at once.

    The signal raises KeyboardInterrupt or SystemExit in the command. A second one ends the process at once: an import
    may have made another exception of the first, or dropped it. SIGUSR2 is ignored with a line.
    """
    heard: list[int] = []

    def handle(number: int) -> None:
        if number == signal.SIGUSR2:
            say(number, NOT_TRAINING)
            return
        if heard:
            say(number, "ending at once")
            os._exit(EXIT_CODE + number)
        heard.append(number)
        say(number, "stopping")
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(EXIT_CODE + number)

    with handled((*STOPPING, signal.SIGUSR2), handle):
        try:
            return command()
        except BaseException:  # also what an import made of the exception
            if not heard:
                raise
            return EXIT_CODE + heard[0]
