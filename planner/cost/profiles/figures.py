"""A figure: one value with its kind and its source.

Framework profiles are composed of figures, and `docs/accuracy/constants.md` lists all of them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

from attrs import field, frozen

_T = TypeVar("_T")


class FigureKind(StrEnum):
    """Origin of the value of a figure."""

    DATASHEET = "datasheet"  # printed by the vendor
    MEASURED = "measured"  # timed on a device, by this project or by the source
    FITTED = "fitted"  # chosen so that predictions of published runs agree
    CODE = "source code"  # counted or read in the framework's source code or documentation
    ASSUMED = "assumed"  # neither counted, measured nor fitted


@frozen
class Figure:
    """One value of a profile, with its kind and its source."""

    value: Any
    kind: FigureKind
    source: str


def measured(value: Any, source: str) -> Figure:
    """Return a figure that was timed on a device."""
    return Figure(value, FigureKind.MEASURED, source)


def fitted(value: Any, source: str) -> Figure:
    """Return a figure that makes predictions of published runs agree."""
    return Figure(value, FigureKind.FITTED, source)


def coded(value: Any, source: str) -> Figure:
    """Return a figure that was read in the framework's source code."""
    return Figure(value, FigureKind.CODE, source)


def setting(default: _T, meaning: str, *, unit: str = "", kind: FigureKind = FigureKind.CODE, source: str = "") -> _T:
    """Declare a field of a group: its default value with meaning, unit, kind and source."""
    metadata = {"meaning": meaning, "unit": unit, "figure": Figure(default, kind, source)}
    return field(default=default, metadata=metadata)
