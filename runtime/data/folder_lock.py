"""A folder that one process at a time writes: its lock, and the errors of writing there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from megaloom.dsl.errors import UserError

LOCK = ".lock"  # name of the file with the lock


@contextlib.contextmanager
def locked_folder(folder: Path, *, held: str, choose: str, kept: Callable[[], bool] | None = None) -> Iterator[None]:
    """Create a folder and hold its lock. The lock ends with the process.

    Raise UserError with the message `held` if another process holds the lock, and with the advice `choose` if the
    folder cannot be written.

    kept: returns True once the folder has results. A UserError before removes what this context made: the lock, and
    the folder with all that is in it. Without `kept`, all stays.
    """
    new, made = _missing(folder), not (folder / LOCK).exists()
    try:
        file = _opened(folder)
    except BlockingIOError:
        raise UserError(held) from None
    except OSError as error:
        _remove_empty(new)
        raise UserError(f"cannot write in {folder}: {error.strerror}\n{choose}") from None
    with file:
        before = kept is not None and kept()
        others = any(path.name != LOCK for path in folder.iterdir())  # of a process that had the lock before
        try:
            yield
        except UserError:
            if kept and (before or not kept()):
                if new and not others:
                    shutil.rmtree(folder, ignore_errors=True)
                    _remove_empty(new)
                elif made:
                    (folder / LOCK).unlink(missing_ok=True)
            raise


def _opened(folder: Path) -> IO[bytes]:
    """Create a folder and return its lock, held. Raise BlockingIOError if another process holds it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("ab")  # leaves the time of a lock that is there
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / LOCK).exists() and os.path.samestat(os.fstat(file.fileno()), os.stat(folder / LOCK)):
                return file
        except OSError:
            file.close()
            raise
        file.close()  # its holder has removed it: a second process may hold another


def _missing(folder: Path) -> list[Path]:
    """Return a folder and those above it that are not there, the innermost first."""
    return [path for path in (folder, *folder.parents) if not os.path.lexists(path)]


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders, the innermost first, up to one that has anything in it."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


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
