"""The error for a run that cannot be read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from megaloom.dsl.errors import UserError

if TYPE_CHECKING:
    from .parser import Arguments


def refuse_run(a: Arguments, message: str, *dests: str, instead: str = "") -> NoReturn:
    """Raise UserError with the line that states the first of these arguments, if one does."""
    origin = a.origin(*dests)
    where = f"{origin}: " if origin else ""
    raise UserError(f"{where}{message}" + (f"\n{instead}" if instead else ""))
