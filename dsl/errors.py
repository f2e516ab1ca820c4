"""Errors that are the user's to mend, and the places in the user's program that they name."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class UserError(ValueError):
    """A wrong input, said in one message: what is wrong, where, and what would work.

    The commands print it without a traceback and exit with status 2. Our own invariants
    are assertions instead.
    """

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *getattr(self, "__notes__", ())])


class ShapeError(UserError):
    """A program whose dims do not fit. Its notes say where, outermost last."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.at = caller()

    def __str__(self) -> str:
        return super().__str__() + ("" if self.noted else f"\n  at {short(self.at)}")

    @property
    def noted(self) -> bool:
        """Whether its notes say where."""
        return hasattr(self, "__notes__")


def located(error: ShapeError, what: str, at: str) -> ShapeError:
    """The error, with a note of where it happened."""
    error.add_note(f"  in {what:<40} {short(at)}")
    return error


def nearest(name: object, known: Iterable[str]) -> str:
    """What stands between an unknown name and the known ones: a question, if one of them is close to it."""
    near = get_close_matches(str(name), known, 1, 0.6)
    return f": did you mean {near[0]}?\n" if near else ": "


def divisors(n: int) -> str:
    """The numbers that divide n, as a list to read."""
    return ", ".join(str(i) for i in range(1, n + 1) if n % i == 0)


def caller() -> str:
    """The first line of the user's program on the stack, as file:line."""
    frame = sys._getframe(1)
    package = __package__ or ""
    while frame.f_back and (
        frame.f_globals.get("__name__", "").startswith(package) or frame.f_code.co_filename.startswith("<")
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def short(at: str) -> str:
    """A place as people write it: below the working directory relative, else the file's own name."""
    path = Path(at)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name
