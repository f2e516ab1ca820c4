"""Calibration of a cluster as a value: what its figures were fitted to, and the errors of runs that were left out."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen

from megaloom.dsl.errors import UserError

WIDEST = 100.0  # factor of an interval that is a mistake


def _ends(owner: Calibration, attribute: Attribute[Any], value: tuple[float, float]) -> None:
    low, high = value
    if not 1 / WIDEST <= low <= 1 <= high <= WIDEST:  # also refuses nan
        raise UserError(
            f"calibration.step = [{low:g}, {high:g}] is not plausible\n"
            "it is the interval of measured over predicted step times around 1, such as [0.92, 1.09]"
        )


def _high(owner: Calibration, attribute: Attribute[Any], value: float | None) -> None:
    if value is not None and not 1 / WIDEST <= value <= WIDEST:
        raise UserError(
            f"calibration.memory_high = {value:g} is not plausible\n"
            "it is the upper end of measured over predicted bytes of tensors, such as 1.05"
        )


def _count(owner: Calibration, attribute: Attribute[Any], value: int) -> None:
    if not 2 <= value <= 10**6:
        raise UserError(f"calibration.runs must be a number of at least 2 runs, got {value}")


@frozen(kw_only=True)
class Calibration:
    """Runs of Megatron-core to which the figures of a cluster were fitted, and the errors of those left out in turn."""

    runs: int = field(validator=_count)  # number of measured runs
    classes: tuple[str, ...]  # classes of these runs; the intervals hold for no others
    step: tuple[float, float] = field(validator=_ends)  # measured over predicted step time, nine of ten within
    memory_high: float | None = field(default=None, validator=_high)
    """Measured over predicted bytes of tensors, which 19 of 20 runs stay below; null if no log reports them."""
