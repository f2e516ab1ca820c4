"""Run one call of the command line in a forked child, with limits on its time and memory.

The parent has imported everything, so a case costs what its command computes.
"""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from attrs import frozen

SECONDS = 30.0  # of one case
NBYTES = 4 << 30  # of address space beyond the parent's
LONGEST = 400_000  # bytes of output that are kept


@frozen
class Ended:
    """The end of a call. code: None after the time limit. files: those that it added or changed."""

    code: int | None
    text: str
    seconds: float
    files: tuple[str, ...]


def call(words: Sequence[str], folder: Path, seconds: float = SECONDS) -> Ended:
    """Call `megaloom WORDS` in a folder and wait for its end."""
    before, start = _files(folder), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-tmp-") as temporary:
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            os.close(read)
            _main(words, folder, temporary, write)
        os.close(write)
        text, ended = _output(read, child, start + seconds)
        left = tuple(f"$TMPDIR/{path.name}" for path in Path(temporary).iterdir())
    code = os.waitstatus_to_exitcode(ended) if ended is not None else None
    after = _files(folder)
    files = sorted(name for name in before | after if before.get(name) != after.get(name))
    return Ended(code, text, time.monotonic() - start, (*files, *left))


def _main(words: Sequence[str], folder: Path, temporary: str, write: int) -> NoReturn:
    """Be the child: run the command and exit with its code; 70 after a traceback."""
    code = 70
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(write, 1)
        os.dup2(write, 2)
        sys.stdout, sys.stderr = (open(fd, "w", closefd=False) for fd in (1, 2))  # noqa: SIM115 (the parent's may be a file)
        os.chdir(folder)
        os.environ.update(TMPDIR=temporary, COLUMNS="200", HOME=temporary, XDG_CACHE_HOME=temporary)
        tempfile.tempdir = None
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + NBYTES, used + NBYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        from megaloom.runtime.cli.main import main

        sys.argv = ["megaloom", *words]
        code = main(list(words))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _output(read: int, child: int, deadline: float) -> tuple[str, int | None]:
    """Return the output of a child and its status, None if it had to be ended at the deadline."""
    parts: list[bytes] = []
    status: int | None = None
    late = False
    while True:
        ready, _, _ = select.select([read], [], [], 0.05)
        if ready:
            if not (part := os.read(read, 1 << 16)):
                break
            if sum(map(len, parts)) < LONGEST:
                parts.append(part)
            continue
        if status is None and (ended := os.waitpid(child, os.WNOHANG))[0]:
            status = ended[1]
        if status is not None:
            break
        if time.monotonic() > deadline:
            late = True
            break
    os.close(read)
    if status is None and not late:
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        late, status = not ended[0], ended[1]
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if late:
        os.waitpid(child, 0)
    return b"".join(parts).decode("utf-8", "replace"), None if late else status


def _files(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return the files below a folder, each with what changes when it is written."""
    out = {}
    for path, folders, names in os.walk(folder):
        for name in (*folders, *names):
            if name == "__pycache__" or path.endswith("__pycache__"):
                continue
            full = os.path.join(path, name)
            at = os.lstat(full)
            is_folder = name in folders
            out[os.path.relpath(full, folder)] = (
                at.st_mode,
                0 if is_folder else at.st_size,
                0 if is_folder else at.st_mtime_ns,
            )
    return out


def emptied(folder: Path) -> Path:
    """Return a folder without files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
