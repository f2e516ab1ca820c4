"""A run that exists: its model, layout, workload and devices, each with the line that states it."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from megaloom.dsl.graph import Model
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Runtime, Workload
from megaloom.planner.cost.profiles.groups import FrameworkProfile

from .words import Origin, Word


@frozen
class Stated:
    """A fact of a run as it is reported: its group, its name, its value, and the line; None for a default."""

    group: str  # model, layout, workload, program
    name: str
    value: str
    origin: Origin | None = None


@frozen
class Note:
    """A sentence about a run, with the line that it is about: what is assumed, or what the prediction leaves out."""

    text: str
    origin: Origin | None = None


@frozen
class Devices:
    """Number of devices of a run, and of the processes on each machine; None if that is not stated."""

    count: int
    per_machine: int | None = None
    origin: Origin | None = None


@frozen
class Measured:
    """The measured step of a run, and what was left out of it.

    seconds: the median of the iterations that count. left_out: sentences.
    """

    seconds: float
    iterations: int = 1
    left_out: tuple[str, ...] = ()
    nbytes: int | None = None  # most memory that tensors took on a device
    rank: int | None = None  # of that device; None if the log does not say
    reserved: int | None = None  # most memory that torch's allocator held there
    by_rank: tuple[tuple[int, int], ...] = ()  # each rank that is reported, and the most that its tensors took
    origin: Origin | None = None


@frozen
class Edit:
    """A change of a run's flags: the new words, none to remove the flag, and the words of the file that it replaces.

    after: for a new flag, the words of flags that it may stand after, best first.
    """

    flag: str  # with its dashes
    new: tuple[str, ...]
    old: tuple[Word, ...] = ()
    after: tuple[tuple[Word, ...], ...] = ()

    @property
    def text(self) -> str:
        """The change in words: `--sequence-parallel`, `without --use-distributed-optimizer`."""
        return " ".join(self.new) or f"without {self.flag}"


Edits = Callable[[Plan], tuple[Edit, ...]]
"""Function that returns the changes of a file's flags which make its run the run of a plan."""


@frozen(kw_only=True)
class TrainingRun:
    """A run as its file describes it.

    program: the framework that the file is for. version: its release, if the file or the user states one. defaults:
    the release of Megatron-LM whose defaults hold where the file states no value; empty if none are taken.
    stages: the first graph node of each pipeline stage, in model order. profile: the framework as its flags set it.
    notes: what the prediction leaves out.
    assumed: what the file does not say, and what was taken instead.
    """

    path: str
    program: str
    version: str
    model: Model
    layout: Layout
    workload: Workload
    stages: tuple[int, ...]
    profile: FrameworkProfile
    devices: Devices
    stated: tuple[Stated, ...] = ()
    notes: tuple[Note, ...] = ()
    assumed: tuple[Note, ...] = ()
    measured: Measured | None = None
    edits: Edits | None = None
    defaults: str = ""
    own: Plan | None = None  # the plan of Megaloom that the file is

    @property
    def runtime(self) -> Runtime:
        """The program that the prediction is for."""
        return Runtime.MEGATRON if self.own is None else self.own.runtime
