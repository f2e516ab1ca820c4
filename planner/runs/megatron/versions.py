"""Releases of Megatron-LM whose defaults are known, and what differs between them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megaloom.dsl.errors import UserError

NEWEST = "0.16.1"
FIRST = (0, 6)
# Defaults of releases up to the one named, where they differ from those of NEWEST. Compared over the argument parsers
# of core_v0.6.0, 0.7.0, … 0.15.0 and 0.16.1: no other default of a field of a run changed.
OLDER: Mapping[tuple[int, int], Mapping[str, object]] = MappingProxyType({(0, 13): {"mscale_all_dim": 1.0}})


def check_version(text: str) -> str:
    """Return a release as its number: `core_v0.12.0` is 0.12.0. Raise UserError for one that is not known."""
    number = text.strip().removeprefix("core_").removeprefix("v").removeprefix("r")
    parts = number.split(".")
    if not (2 <= len(parts) <= 3 and all(part.isdigit() for part in parts)):
        raise UserError(f"--version-of must be a release of Megatron-LM such as {NEWEST}, got {text!r:.40}")
    if not FIRST <= _minor(number) <= _minor(NEWEST):
        known = f"{FIRST[0]}.{FIRST[1]} to {NEWEST}"
        raise UserError(f"the defaults of Megatron-LM {number} are not known\nknown are those of {known}")
    return number


def defaults_of(number: str) -> Mapping[str, object]:
    """Return the defaults of a release that differ from those of NEWEST."""
    out: dict[str, object] = {}
    for last, changed in OLDER.items():
        out |= changed if _minor(number) <= last else {}
    return out


def _minor(number: str) -> tuple[int, int]:
    major, minor, *_ = number.split(".")
    return int(major), int(minor)
