"""An option of a run as a field of a group: its value, and what it states about itself.

The command line, the settings file, run.json, the notes of a resumed run, the comparison of ranks and the printed
command to train further are projections of these statements. The help of an option is the text below its field.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import Attribute, field, frozen

from megaloom.dsl.errors import UserError

Check = Callable[[Any, "Attribute[Any]", Any], None]


@frozen(kw_only=True)
class Option:
    """One option: its group and name, and who uses it."""

    group: str  # field of `RunOptions`
    name: str  # in Python, in run.json and, with hyphens, in a settings file
    default: Any
    flag: str  # on the command line
    unit: str | None = None  # of a quantity: see `units`
    kept: bool = True  # run.json has it
    noted: bool = True  # a resumed run says that it has changed; False: it changes in silence
    compared: bool = True  # ranks that torchrun or srun has started must have the same
    repeated: bool = True  # the command to train further has it

    @classmethod
    def of(cls, group: str, attribute: Attribute[Any], unit: str | None = None) -> Option:
        """Return the option that a field of a group is. One that run.json does not have changes in silence."""
        stated = {"flag": flag_of_option(attribute.name), **attribute.metadata}
        stated["noted"] = stated.get("noted", True) and stated.get("kept", True)
        return cls(group=group, name=attribute.name, default=attribute.default, unit=unit, **stated)

    def words(self, value: Any) -> tuple[str, ...]:
        """Return the words with which the command line has this value."""
        return words_of(self.flag, value)

    def text(self, value: Any) -> str:
        """Return a value in a message. Steps that are an object are named by their class."""
        if isinstance(value, tuple):
            return " ".join(value)
        if value is None or isinstance(value, str | bool | int | float | Path):
            return str(value)
        return f"{type(value).__module__}.{type(value).__qualname__}"


def option(
    default: Any, *, check: Check | None = None, convert: Callable[[Any], Any] | None = None, **states: Any
) -> Any:
    """Return a field of a group of options. states: those fields of `Option` that are not at their default.

    The parameter of `convert` has the type that the command line offers.
    """
    return field(default=default, validator=check, converter=convert, metadata=states)


def words_of(flag: str, value: Any) -> tuple[str, ...]:
    """Return the words with which the command line gives a flag this value."""
    if isinstance(value, bool):
        return (flag if value else f"--no-{flag.removeprefix('--')}",)
    return (flag, *(value or ("none",))) if isinstance(value, tuple) else (flag, str(value))


def flag_of_option(name: str) -> str:
    """Return the command-line flag of a name in Python."""
    return "--" + name.replace("_", "-")


def _is_given(attribute: Attribute[Any], value: object) -> bool:
    """Return False for None where that is the default."""
    return value is not None or attribute.default is not None


def at_least(low: float) -> Check:
    """Return a check that requires a finite number of at least `low`."""

    def check(owner: Any, attribute: Attribute[Any], value: float) -> None:
        if _is_given(attribute, value) and not low <= value < float("inf"):
            raise UserError(f"{flag_of_option(attribute.name)} must be at least {low:g}, got {value:g}")

    return check


def within(low: float, high: float) -> Check:
    """Return a check that requires a number in [low, high]. NaN is refused."""

    def check(owner: Any, attribute: Attribute[Any], value: float) -> None:
        if _is_given(attribute, value) and not low <= value <= high:
            flag = flag_of_option(attribute.name)
            raise UserError(f"{flag} {value:g} is out of range\ngive a value from {low:g} to {high:g}")

    return check


def positive(advice: str) -> Check:
    """Return a check that requires a number above 0 and below a million. advice: the last line of the error."""

    def check(owner: Any, attribute: Attribute[Any], value: float) -> None:
        if _is_given(attribute, value) and not 0 < value < 1e6:
            raise UserError(f"{flag_of_option(attribute.name)} {value:g} is out of range\n{advice}")

    return check
