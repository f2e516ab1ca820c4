"""A folder that one process at a time writes: its lock, and the errors of writing there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megaloom.dsl.errors import UserError

LOCK = ".lock"  # name of the file with the lock


@contextlib.contextmanager
def locked_folder(folder: Path, *, held: str, choose: str) -> Iterator[None]:
    """Create a folder and hold its lock. The lock ends with the process.

    Raise UserError with the message `held` if another process holds the lock, and with the advice `choose` if the
    folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("w")
    except OSError as error:
        raise UserError(f"cannot write in {folder}: {error.strerror}\n{choose}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(held) from None
        yield


def check_free(folder: Path, *, held: str, choose: str) -> None:
    """Raise UserError if `locked_folder` would: the folder is locked or cannot be written. Nothing is created."""
    if (folder / LOCK).exists():
        with locked_folder(folder, held=held, choose=choose):
            return
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    reason = "" if existing.is_dir() else os.strerror(errno.ENOTDIR)
    if not reason and not os.access(existing, os.W_OK | os.X_OK):
        reason = os.strerror(errno.EROFS if os.statvfs(existing).f_flag & os.ST_RDONLY else errno.EACCES)
    if reason:
        raise UserError(f"cannot write in {folder}: {reason}\n{choose}")


@contextlib.contextmanager
def named_write_errors(folder: Path, fix: str) -> Iterator[None]:
    """Turn an OSError of writing below a folder into a UserError with the folder, the reason and the advice `fix`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and not Path(error.filename).is_relative_to(folder):
            raise
        reason = error.args[0][0][-1] if isinstance(error, shutil.Error) else error.strerror or error
        raise UserError(f"cannot write in {folder}: {reason}\n{fix}") from None
