"""Units of options: `save_every: Annotated[int, IN_STEPS]` is shown as `--save-every STEPS`.

Releases of cyclopts before 5 do not show it.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, get_type_hints

from cyclopts import Parameter

_HAS_METAVAR = "metavar" in signature(Parameter).parameters


def _unit(name: str) -> Parameter:
    return Parameter(metavar=name.upper()) if _HAS_METAVAR else Parameter()


_NAMES = ("epochs", "minutes", "steps", "batches", "sequences", "checkpoints", "elements")
_PARAMETERS = tuple(map(_unit, _NAMES))
IN_EPOCHS, IN_MINUTES, IN_STEPS, IN_BATCHES, IN_SEQUENCES, IN_CHECKPOINTS, IN_ELEMENTS = _PARAMETERS


def units_of(group: type) -> dict[str, str]:
    """Return the units of a group's options, by the name of the option; those of plain numbers and words are absent."""
    hints: dict[str, Any] = get_type_hints(group, include_extras=True)
    stated = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {
        name: unit
        for name, extras in stated.items()
        for unit, parameter in zip(_NAMES, _PARAMETERS, strict=True)
        if any(extra is parameter for extra in extras)
    }
