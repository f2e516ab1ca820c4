"""Lock of a folder that one process at a time may write."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from megaloom.dsl.errors import UserError


@contextlib.contextmanager
def locked_folder(folder: Path, *, held: str, choose: str) -> Iterator[None]:
    """Create a folder and hold its lock. The lock ends with the process.

    Raise UserError with the message `held` if another process holds the lock, and with the advice `choose` if the
    folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(f"cannot write in {folder}: {error.strerror}\n{choose}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(held) from None
        yield
