"""A flag of Megatron-LM's command line, and what it means for a prediction."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from math import isfinite
from typing import Any

from attrs import evolve, frozen

NEGATIVE = re.compile(r"(?:^|_)(?:no|disable)_")
LARGEST_VALUE = 2**31 - 1  # of a whole number that is a field of the model, the layout or the workload


class Effect(Enum):
    """The effect of a flag on a training step."""

    READ = "a field of the model, the layout or the workload"
    NOTHING = "neither the mathematics of a step nor its time nor its memory"
    LITTLE = "time or memory by a few percent, or the mathematics alone, which the prediction leaves out"
    REFUSED = "the step in a way that is not modelled"


@frozen(kw_only=True)
class Flag:
    """One flag, as argparse knows it, with its effect.

    nargs: 0 of a switch, 1 of a value, else argparse's letter or number. default: the value without the flag. sets:
    the value that a switch gives. least: the smallest number that is a field of a run. effect: see `Effect`; a flag
    whose value is among `harmless` has none. why: what it changes, for a message.
    """

    names: tuple[str, ...]
    dest: str
    nargs: str = "1"
    kind: type[object] = str
    default: object = None
    sets: object = True
    least: int = 0
    choices: tuple[str, ...] = ()
    effect: Effect = Effect.READ
    why: str = ""
    harmless: tuple[object, ...] = ()

    @property
    def name(self) -> str:
        """The first spelling of the flag."""
        return self.names[0]

    @property
    def due(self) -> str:
        """The kind of value that the flag takes, in words for a message; empty for text."""
        if self.kind is int and self.effect is Effect.READ:
            return f"a whole number from {self.least} to {LARGEST_VALUE:,}"
        return {int: "a whole number", float: f"a number from {self.least}"}.get(self.kind, "")

    def typed(self, text: str) -> Any:
        """Return one value as the flag's type; None if the text is not of it, or out of range for a field of a run."""
        if not self.due:
            return text
        try:
            number = int(text) if self.kind is int else float(text)
        except ValueError:
            return None
        largest = LARGEST_VALUE if self.kind is int else number
        return number if isfinite(number) and self.least <= number <= largest else None


def _names(names: str) -> tuple[tuple[str, ...], str]:
    spellings = tuple(f"--{name}" for name in names.split("|"))
    return spellings, spellings[0].removeprefix("--").replace("-", "_")


def value_flag(
    names: str, kind: type[object], default: object = None, *, dest: str = "", choices: str = "", nargs: str = "1"
) -> Flag:
    """Return a flag with a value that is a field of the run. names: its spellings without dashes, as in `a|b`.

    A whole number is a size, of at least 1; `size_or_none` returns a flag for which 0 stands for none.
    """
    spellings, own = _names(names)
    return Flag(
        names=spellings,
        dest=dest or own,
        kind=kind,
        default=default,
        choices=tuple(choices.split()),
        nargs=nargs,
        least=int(kind is int),
    )


def size_or_none(names: str, default: object = None, *, nargs: str = "1") -> Flag:
    """Return a flag with a whole number that is a field of the run, of which 0 stands for none."""
    return evolve(value_flag(names, int, default, nargs=nargs), least=0)


def switch_flag(names: str, *, dest: str = "", sets: bool = True) -> Flag:
    """Return a flag without a value that is a field of the run."""
    spellings, own = _names(names)
    return Flag(names=spellings, dest=dest or own, nargs="0", kind=bool, default=not sets, sets=sets)


def harmless(nargs: str, text: str) -> Iterator[Flag]:
    """Yield the flags of a text that change nothing: spellings without dashes, the destination after a colon."""
    for word in text.split():
        names, _, dest = word.partition(":")
        spellings, own = _names(names)
        yield Flag(names=spellings, dest=dest or own, nargs=nargs, effect=Effect.NOTHING)


def judged(effect: Effect, text: str) -> Iterator[Flag]:
    """Yield the flags of a table, one a line: spellings, nargs, harmless values between commas, what it changes.

    The first harmless value is the default. A switch is harmless where it is not given; one of another destination
    than its name, which says no or disable, sets False.
    """
    for line in filter(None, map(str.strip, text.splitlines())):
        words, nargs, fine, why = (part.strip() for part in line.split(" ; ", 3))
        names, _, dest = words.partition(":")
        spellings, own = _names(names)
        sets = not (dest and NEGATIVE.search(own))
        values: tuple[object, ...] = tuple(fine.split(",")) if fine != "-" else ()
        if nargs == "0":
            values = (not sets,)
        yield Flag(
            names=spellings,
            dest=dest or own,
            nargs=nargs,
            kind=bool if nargs == "0" else str,
            default=values[0] if values else None,
            sets=sets,
            effect=effect,
            why=why,
            harmless=values,
        )
