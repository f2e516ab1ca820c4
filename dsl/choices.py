"""Enumerations whose members are numbers too: `Choice` for one of several names, `Member` for the elements of a set."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Choice(IntEnum):
    """One of several named values; `Recompute("full")` is `Recompute.FULL`, and `str` gives the name back."""

    @classmethod
    def _missing_(cls, value: object) -> Choice | None:
        return cls.__members__.get(value.upper()) if isinstance(value, str) else None

    def __str__(self) -> str:
        return self.name.lower()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class Member(StrEnum):
    """Member of a set that is stored as a bit mask."""

    bit: int

    def __init__(self, _: str) -> None:
        self.bit = 1 << len(type(self).__members__)
