"""Run a command as a process: without cyclic garbage collection, and with readable errors of output."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper


@contextmanager
def cyclic_gc_disabled() -> Iterator[None]:
    """Disable the cyclic garbage collector, which takes 10 % of a search and finds hardly any cycles."""
    enabled = gc.isenabled()
    atexit.register(gc.freeze)  # so that the interpreter does not look for cycles at exit either
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def run_and_flush(command: Callable[[], int | None]) -> int:
    """Run a command, flush its output and return its exit code.

    A reader that closes the pipe early is no error. Without stdout or stderr (`>&-`), output is dropped.
    Raises UserError if the output cannot be written.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # names of files need not be UTF-8
            stream.reconfigure(errors="backslashreplace")
    try:
        code = command() or 0
        sys.stdout.flush()
        return code
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):  # rich turns a broken pipe into an exit
            raise
        return 0
    except RecursionError:
        from megaloom.dsl.errors import UserError

        raise UserError("the input is nested more deeply than Python's stack\nuse fewer levels") from None
    except RuntimeError as error:
        if not str(error).startswith("Symlink loop"):  # of Path.resolve
            raise
        from megaloom.dsl.errors import UserError

        raise UserError(f"{error}: these links form a circle\ngive another path") from None
    except OSError as error:
        if error.filename is not None:
            from megaloom.dsl.errors import UserError

            raise UserError(f"cannot use {error.filename!r}: {error.strerror}\ngive another path") from None
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # drops what is still in the buffer
        if isinstance(error, BrokenPipeError):
            return 0
        from megaloom.dsl.errors import UserError

        raise UserError(f"cannot write the output: {error.strerror}") from None
