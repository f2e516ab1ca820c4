"""A published training run: model, layout, cluster and framework profile to predict from, and what was measured."""

from __future__ import annotations

from attrs import frozen

from megaloom.dsl.graph import Model
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.cost.profiles.groups import FrameworkProfile


@frozen(kw_only=True)
class TrainingRun:
    """One published run."""

    id: str
    source: str
    name: str  # of the model, as in the source
    gpu: str
    sparse: bool  # a mixture of experts
    model: Model
    layout: Layout
    cluster: Cluster
    workload: Workload
    profile: FrameworkProfile
    step_seconds: float | None
    memory_gib: float | None
    memory_kind: str  # "allocated", "reserved", "device" (nvidia-smi), "" if memory was not measured
    last_rank: bool = False  # memory is that of the last pipeline rank, not of the fullest one
    oom: bool = False  # the run ran out of memory
    sweep: str = ""  # runs of one sweep differ in their layout alone


@frozen
class Skipped:
    """A row that is not predicted, and the reason."""

    id: str
    source: str
    gpu: str
    precision: str
    sparse: bool
    reason: str


class UnfitError(Exception):
    """The reason why a row is not predicted."""
