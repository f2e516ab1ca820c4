"""Releases of Megatron-LM whose flags and defaults are known, and what differs between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from megaloom.dsl.errors import UserError

from .newer_flags import SINCE, UNTIL

ASSUMED_RELEASE = "0.16.1"
NEWEST = "0.19.0"
FIRST = (0, 6)
# Defaults of releases up to the one named, or from it on, where they differ from those of ASSUMED_RELEASE. Compared
# over the argument parsers of core_v0.6.0, 0.7.0, … 0.15.0, 0.16.1, 0.17.1, 0.18.2 and 0.19.0: no other default of a
# field of a run changed.
OLDER: Mapping[tuple[int, int], Mapping[str, object]] = MappingProxyType({(0, 13): {"mscale_all_dim": 1.0}})
NEWER: Mapping[tuple[int, int], Mapping[str, object]] = MappingProxyType(
    {
        (0, 18): {"data_parallel_sharding_strategy": "optim_grads_params"},
        (0, 19): {"megatron_fsdp_main_grads_dtype": "auto"},
    }
)
RENAMED: Mapping[str, str] = MappingProxyType({"fp4_param_gather": "fp4_param"})
"""Destinations of newer releases by those of ASSUMED_RELEASE, as logs list them."""


def check_version(text: str) -> str:
    """Return a release as its number: `core_v0.12.0` is 0.12.0. Raise UserError for one that is not known."""
    number = text.strip().removeprefix("core_").removeprefix("v").removeprefix("r")
    parts = number.split(".")
    if not (2 <= len(parts) <= 3 and all(part.isdecimal() for part in parts)):
        raise UserError(f"--version-of must be a release of Megatron-LM such as {NEWEST}, got {text!r:.40}")
    if not FIRST <= _minor(number) <= _minor(NEWEST):
        known = f"{FIRST[0]}.{FIRST[1]} to {NEWEST}"
        raise UserError(f"the defaults of Megatron-LM {number} are not known\nknown are those of {known}")
    return number


def defaults_of(number: str) -> Mapping[str, object]:
    """Return the defaults of a release that differ from those of ASSUMED_RELEASE."""
    out: dict[str, object] = {}
    for last, changed in OLDER.items():
        out |= changed if _minor(number) <= last else {}
    for first, changed in NEWER.items():
        out |= changed if _minor(number) >= first else {}
    return out


def least_release(names: Iterable[str]) -> str:
    """Return ASSUMED_RELEASE, or the release that added the newest of these flags if it is newer."""
    return max((ASSUMED_RELEASE, *(SINCE[name] for name in names if name in SINCE)), key=_minor)


def other_releases(names: Iterable[str], number: str) -> Iterator[tuple[str, str]]:
    """Yield the flags among these that a release does not have, with the sentence that says so."""
    for name in names:
        if name in SINCE and _minor(number) < _minor(SINCE[name]):
            yield name, f"Megatron-LM {number} does not have {name}, which {SINCE[name]} adds"
        if name in UNTIL and _minor(number) >= _minor(UNTIL[name]):
            yield name, f"Megatron-LM {number} does not have {name}, which {UNTIL[name]} drops"


def _minor(number: str) -> tuple[int, int]:
    major, minor, *_ = number.split(".")
    return int(major), int(minor)
