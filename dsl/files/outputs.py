"""Places for output, checked before the work whose results they are to hold."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress

from megaloom.dsl.errors import UserError

AnyPath = str | os.PathLike[str]


def check_output_file(path: AnyPath | None, option: str = "") -> None:
    """Raise UserError unless a file can be written there. Nothing is left behind. None is no place, which is fine.

    option: the option that gives the path, for the message.
    """
    if path is None:
        return
    try:
        name = _looked_at(path)
        if os.path.isdir(name):
            raise OSError(0, "it is a folder")
        if os.path.exists(name):
            if not os.access(name, os.W_OK):
                raise PermissionError(0, "permission denied")
            if stat.S_ISCHR(os.stat(name).st_mode):
                _check_device(name)
        else:
            _check_folder(os.path.dirname(os.path.realpath(name)))
    except OSError as error:
        what = f"cannot write {_shown(path, option)}: {error.strerror}"
        raise UserError(f"{what}\ngive another path, in a folder that exists") from None


def check_output_folder(path: AnyPath | None, option: str = "") -> None:
    """Raise UserError unless a folder is there or can be made, with those above it. Nothing is left behind."""
    if path is None:
        return
    try:
        above = os.path.realpath(_looked_at(path))
        while not os.path.lexists(above):
            above = os.path.dirname(above)
        if not os.path.isdir(above):
            raise NotADirectoryError(0, f"{above} is not a folder")
        _check_folder(above)
    except OSError as error:
        raise UserError(f"cannot write into {_shown(path, option)}: {error.strerror}\ngive another folder") from None


def _looked_at(path: AnyPath) -> str:
    """Return a path as text. Raises OSError for an empty one, a name that is too long, and links in a circle."""
    name = os.fspath(path)
    if not name:
        raise OSError(0, "the path is empty")
    with suppress(FileNotFoundError, NotADirectoryError):
        os.stat(name)
    return name


def _check_device(name: str) -> None:
    """Raise OSError unless a device takes bytes: /dev/full does not."""
    device = os.open(name, os.O_WRONLY)
    try:
        os.write(device, b"")
    finally:
        os.close(device)


def _check_folder(folder: str) -> None:
    """Raise OSError unless a file can be made in a folder."""
    with tempfile.TemporaryFile(dir=folder, prefix=".megaloom-"):
        pass


def _shown(path: AnyPath, option: str) -> str:
    return f"{option} {os.fspath(path)!r}".lstrip() if option else f"{os.fspath(path)!r}"
