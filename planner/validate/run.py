"""A training run that others published: model, layout, cluster and profile to predict from, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, nan
from typing import Any

from attrs import frozen

from megaloom.dsl.graph import Model
from megaloom.planner.contract.choices import Module, Recompute
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.cost.profiles.groups import FrameworkProfile

Row = Mapping[str, Any]


@frozen(kw_only=True)
class Run:
    """One published run."""

    id: str
    source: str
    name: str  # of the model, as the source says it
    gpu: str
    sparse: bool  # a mixture of experts
    model: Model
    layout: Layout
    cluster: Cluster
    workload: Workload
    profile: FrameworkProfile
    step_seconds: float | None
    memory_gib: float | None
    memory_kind: str  # "allocated", "reserved", "device" (as nvidia-smi shows it), "" if there is none
    last_rank: bool = False  # whether memory is that of the last pipeline rank, rather than of the fullest
    oom: bool = False  # it ran out of memory
    sweep: str = ""  # runs of one sweep differ in their layout alone


@frozen
class Skipped:
    """A row that is no run that can be predicted, and why."""

    id: str
    source: str
    gpu: str
    precision: str
    sparse: bool
    reason: str


class UnfitError(Exception):
    """Why a row is left out."""


def recompute(said: object) -> tuple[Recompute, tuple[Module, ...]]:
    """What is computed again, and which modules: the core of attention where none are named. Where nothing is said,
    nothing.
    """
    if isinstance(said, list):  # of modules
        said = f"selective:{','.join(map(str, said))}" if said else "none"
    mode, _, names = str(said or "none").lower().partition(":")
    if mode.startswith("full"):
        return Recompute.FULL, ()
    if not mode.startswith("selective"):
        return Recompute.NONE, ()
    return Recompute.SELECTIVE, tuple(m for m in Module if {m, m.removeprefix("mla_")} & set(names.split(",")))


MOST = 2**31 - 1  # of any amount of a row
LARGEST = 10_000  # of layers, chunks and the like, of which each is built


def whole(row: Row, key: str, default: int | None = None, most: int = MOST) -> int:
    """A whole number of a row. Nothing, an empty field and 0 say that it is not known."""
    value = row.get(key)
    if value in (None, "", 0) and not isinstance(value, bool):
        if default is None:
            raise UnfitError(f"no {key}")
        return default
    number = _figure(value, key, "whole number")
    if number != int(number) or not 0 <= number <= most:
        raise UnfitError(f"{key} of {value!r} is no whole number from 1 to {most:,}")
    return int(number) or whole({}, key, default)


def figure(row: Row, key: str) -> float | None:
    """A positive number of a row, if it is known."""
    value = row.get(key)
    if value in (None, "", 0) and not isinstance(value, bool):
        return None
    number = _figure(value, key, "number")
    if number <= 0:
        raise UnfitError(f"{key} of {value!r} is not positive")
    return number


def text(row: Row, key: str) -> str:
    """What a row says in words; nothing if it does not."""
    value = row.get(key)
    return "" if value is None else str(value)


def yes(row: Row, key: str, default: bool = False) -> bool:
    """Whether a row says so: true, or "true" in words."""
    value = row.get(key)
    return default if value in (None, "") else str(value).lower() not in ("false", "no", "0", "0.0")


def _figure(value: object, key: str, kind: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else nan
    except (ValueError, OverflowError):
        number = nan
    if not isfinite(number):
        raise UnfitError(f"{key} of {value!r:.40} is no {kind}")
    return number
