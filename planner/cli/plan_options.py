"""Options of `plan` in groups: the job that is planned, and what is printed and written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from attrs import frozen
from cyclopts import Parameter

from megaloom.planner.contract.known_devices import MEMORY
from megaloom.planner.contract.workload import Precision, Runtime, Workload

from .arguments import parse_share
from .budget_options import NO_BUDGET, BudgetOptions

if TYPE_CHECKING:
    from megaloom.dsl.graph import Model
    from megaloom.planner.contract.devices import Cluster

_GPUS_HELP = (
    "Number and kind of devices: 64xH100. A range, 8..4096xH100, prints a scaling table. "
    f"Known: {', '.join(MEMORY)}. For another cluster, give a cluster file, 64xours.toml, "
    "or the profile that `megaloom measure` writes. [default: 8xH100]"
)
DEFAULT_GPUS = "8xH100"


@frozen(kw_only=True)
class JobOptions:
    """Devices, workload and runtime for which a model is planned."""

    gpus: Annotated[str | None, Parameter(help=_GPUS_HELP)] = None
    seq: int | None = None
    """Tokens per sequence. [default: 4096, or fewer if the model has fewer learned positions]"""
    batch: int | None = None
    """Global batch: sequences per step, over all devices. [default: 8 per device, fewer beyond 128 devices]"""
    precision: Precision = Precision.BF16
    """Number format of activations and matrix products."""
    runtime: Runtime = Runtime.MEGALOOM
    (
        "Program that will run the plan: megaloom (`megaloom train`), or megatron (Megatron-core with Transformer "
        "Engine, as in Megatron-LM, NeMo and Megatron-Bridge; see `megaloom export`)."
    )
    fastest: Annotated[bool, Parameter(negative="")] = False
    """Choose the fastest layout, also where a simpler one is at most 1 % slower."""
    memory_headroom: Annotated[float, Parameter(converter=parse_share)] = 0.05
    """Share of each device's memory that a plan leaves free, such as 10%."""

    @property
    def cluster_name(self) -> str:
        """Return the number and kind of devices, also where none were given."""
        return DEFAULT_GPUS if self.gpus is None else self.gpus

    @property
    def assumed(self) -> list[str]:
        """Return the options of the workload that were not given."""
        return [flag for flag, value in (("--seq", self.seq), ("--batch", self.batch)) if value is None]

    def workload(self, model: Model, machine: Cluster) -> Workload:
        """Return the workload of a model on a cluster."""
        from megaloom.dsl.graph import graph

        from .actions import default_batch, default_seq

        return Workload(
            seq=default_seq(graph(model)) if self.seq is None else self.seq,
            batch=default_batch(machine) if self.batch is None else self.batch,
            precision=self.precision,
        )


@frozen(kw_only=True)
class ResultOptions:
    """The form of the output, and the files to write."""

    lint: Annotated[bool, Parameter(negative="")] = False
    """Search nothing. List the rules that the given layout breaks (exit code 1); without a layout, list all rules."""
    pareto: Annotated[bool, Parameter(negative="")] = False
    """Print the Pareto front of step time against memory. No plan is written."""
    top: int = 5
    """Number of layouts to show, each on a different device mesh (tp, pp, cp, ep, etp, dp)."""
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False
    """Print JSON only. No plan is written without -o."""
    output: Annotated[str | None, Parameter(name=["-o", "--output"])] = None
    """File for the plan. [default: plan.json]"""
    html: str | None = None
    """File for a web page of the plan: step time, timeline, memory, devices, and other layouts."""
    trace: str | None = None
    """File for a Chrome trace of the predicted step, for ui.perfetto.dev; compressed if its name ends in .gz."""
    cost: BudgetOptions = NO_BUDGET

    @property
    def _files(self) -> tuple[tuple[str, str | None], ...]:
        return ("-o", self.output), ("--html", self.html), ("--trace", self.trace)

    def check(self) -> None:
        """Raise UserError if the number of layouts is none."""
        from megaloom.dsl.errors import UserError

        if self.top < 1:
            raise UserError(f"--top must be at least 1, got {self.top}")

    def check_files(self) -> None:
        """Raise UserError for a file that cannot be written."""
        from megaloom.dsl.files.outputs import check_output_file

        for flag, path in self._files:
            check_output_file(path, flag)

    def check_no_plan(self, gpus: str) -> None:
        """Raise UserError if a file is asked for where no plan is made: for a Pareto front or a range of clusters."""
        from megaloom.dsl.errors import UserError

        printed = "`--pareto` prints the Pareto front" if self.pareto else f"`--gpus {gpus}` prints a scaling table"
        instead = "drop `--pareto`" if self.pareto else "name one cluster"
        for flag in (flag for flag, path in self._files if path):
            raise UserError(f"{printed} and writes no plan\ndrop `{flag}`, or {instead}")


DEFAULT_JOB, DEFAULT_RESULT = JobOptions(), ResultOptions()
