"""Errors caused by the user's input, and the lines of the user's program that they point at."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class UserError(ValueError):
    """A wrong input. The message says what is wrong, where, and what would work.

    The command line prints `full_message` without a traceback and exits with status 2. Violated invariants of our own
    are assertions instead.
    """


class ShapeError(UserError):
    """A program whose dims do not fit. Each layer around the error adds a note with its line, innermost first."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.at = caller()

    def __str__(self) -> str:
        return super().__str__() + ("" if self.has_notes else f"\n  at {short_path(self.at)}")

    @property
    def has_notes(self) -> bool:
        """True if a layer has added its line."""
        return hasattr(self, "__notes__")


def full_message(error: BaseException) -> str:
    """Return the message of an error followed by its notes, which a traceback prints by itself."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def add_location(error: ShapeError, name: str, at: str) -> ShapeError:
    """Add a note that the error happened inside `name`, written at file:line `at`. Returns the error."""
    error.add_note(f"  in {name:<40} {short_path(at)}")
    return error


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return ": did you mean NAME?" and a new line if a known name is close, else ": ".

    It stands between the unknown name and the list of known ones.
    """
    near = get_close_matches(str(name), known, 1, 0.6)
    return f": did you mean {near[0]}?\n" if near else ": "


def safe_repr(value: object, longest: int = 40) -> str:
    """Return the beginning of a value's repr. Where the user's own __repr__ fails, it is the name of the class."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= longest else f"{text[:longest]}…"


def divisors(n: int) -> str:
    """Return the divisors of n as text: "1, 2, 4"."""
    return ", ".join(str(i) for i in range(1, n + 1) if n % i == 0)


def caller() -> str:
    """Return the innermost line on the stack that is outside this package, as file:line."""
    frame = sys._getframe(1)
    package = __package__ or ""
    while frame.f_back and (
        frame.f_globals.get("__name__", "").startswith(package) or frame.f_code.co_filename.startswith("<")
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def short_path(at: str) -> str:
    """Return a path relative to the working directory if it is below it, else its last component."""
    path = Path(at)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name
