"""Groups of options of `megaloom train`: those of the plan, and how those of the run stand on the command line."""

from __future__ import annotations

from typing import Any

from attrs import asdict, frozen
from cyclopts import Parameter, default_name_transform

from megaloom.planner.cli.adapter_options import AdapterOptions
from megaloom.planner.cli.arguments import FixedLayout
from megaloom.planner.contract.layout import flag_of
from megaloom.runtime.options.option import words_of
from megaloom.runtime.training.run_options import OPTIONS, RunOptions

from .defaults import TrainedPrecision


def _option_name(name: str) -> str:
    """Return the name on the command line of an option, or of one of its choices."""
    return OPTIONS[name].flag.removeprefix("--") if name in OPTIONS else default_name_transform(name)


def _shown_default(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


OPTIONS_OF_RUN = Parameter(
    name="*", name_transform=_option_name, show_default=_shown_default, consume_multiple=True, negative_iterable=""
)
"""The options of a run, each with its own flag."""


@frozen(kw_only=True)
class WorkloadOptions:
    """Sequence length, batch, precision and devices of a run that has no plan yet. None is not given."""

    seq: int | None = None
    """Tokens per sequence. [default: 128]"""
    batch: int | None = None
    """Sequences per step, over all devices. [default: 32]"""
    precision: TrainedPrecision | None = None
    """Precision of activations and matrix products. [default: bf16 on GPUs, fp32 on CPU]"""
    devices: int | None = None
    """Number of devices. [default: all GPUs; on CPU a process for each core]"""


@frozen
class PlanOptions:
    """The options that a plan decides. Beside a plan none of them may be given."""

    workload: WorkloadOptions
    fixed: FixedLayout
    adapters: AdapterOptions

    @property
    def given(self) -> dict[str, Any]:
        """Return the values of the options that were given, by flag."""
        groups = (self.workload, self.fixed, self.adapters)
        named = {name: value for group in groups for name, value in asdict(group, recurse=False).items()}
        return {flag_of(name): value for name, value in named.items() if value is not None}

    @property
    def words(self) -> tuple[str, ...]:
        """Return the words of a command that has the same options."""
        return tuple(word for flag, value in self.given.items() for word in words_of(flag, value))


DEFAULT_OPTIONS, DEFAULT_WORKLOAD = RunOptions(), WorkloadOptions()
