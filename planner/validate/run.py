"""A training run that others published: model, layout, cluster and practice to predict from, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from megaloom.dsl.graph import Model
from megaloom.planner.cluster import Cluster
from megaloom.planner.cost.practice import Practice
from megaloom.planner.layout import Layout, Module, Recompute, Workload

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
    practice: Practice
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
    mode, _, names = str(said or "none").lower().partition(":")
    if mode.startswith("full"):
        return Recompute.FULL, ()
    if not mode.startswith("selective"):
        return Recompute.NONE, ()
    return Recompute.SELECTIVE, tuple(m for m in Module if {m, m.removeprefix("mla_")} & set(names.split(",")))


def whole(row: Row, key: str, default: int | None = None) -> int:
    """A whole number of a row."""
    value = row.get(key)
    if value in (None, ""):
        if default is None:
            raise UnfitError(f"no {key}")
        return default
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UnfitError(f"{key} of {value!r} is no whole number") from None
