"""Errors that are the user's to mend."""

from __future__ import annotations


class UserError(ValueError):
    """A wrong input, said in one message: what is wrong, where, and what would work.

    The commands print it without a traceback and exit with status 2. Our own invariants
    are assertions instead.
    """

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *getattr(self, "__notes__", ())])


class ShapeError(UserError):
    """A program whose dims do not fit. Its notes say where, outermost last."""
