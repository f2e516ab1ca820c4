"""The action of `plan --from`: read a run, judge it, print what matters, and write the patch of its file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import evolve

from megaloom.dsl.errors import UserError

if TYPE_CHECKING:
    from megaloom.planner.contract.devices import Cluster
    from megaloom.planner.report.token_budget import TokenBudget
    from megaloom.planner.runs.opinion import Opinion
    from megaloom.planner.runs.run import TrainingRun
    from megaloom.planner.search.variant_choices import FixedAxes

    from .plan_options import JobOptions, ResultOptions
    from .run_options import RunOptions


def check_alone(job: JobOptions, chosen: FixedAxes, result: ResultOptions) -> None:
    """Raise UserError for options that say what the file of a run says."""
    from megaloom.planner.contract.layout import flag_of
    from megaloom.planner.contract.workload import Precision, Runtime

    stated = {"--seq": job.seq, "--batch": job.batch, "-o": result.output}
    stated |= {"--trace": result.trace, "--lint": result.lint, "--pareto": result.pareto, "--fastest": job.fastest}
    stated |= {"--precision": job.precision is not Precision.BF16, "--runtime": job.runtime is not Runtime.MEGALOOM}
    for flag in (*(flag for flag, value in stated.items() if value), *map(flag_of, chosen)):
        raise UserError(f"{flag} has no effect with --from, which reads the run's own\ndrop it")


def print_opinion(
    options: RunOptions,
    job: JobOptions,
    result: ResultOptions,
    positional: tuple[str, ...],
    flags: Sequence[str],
    budget: TokenBudget | None = None,
) -> int:
    """Print the second opinion on a run, and what the tokens of a budget take. Return exit code 1 for a broken rule."""
    from megaloom.dsl.files.outputs import check_output_file
    from megaloom.planner.runs.opinion import second_opinion
    from megaloom.planner.runs.read import read_file
    from megaloom.planner.runs.run import Measured
    from megaloom.planner.runs.text import opinion_text

    assert options.path is not None
    check_output_file(result.html, "--html")
    check_output_file(options.patch, "--patch")
    given, seconds = options.given(positional, job.gpus, flags), options.seconds()
    run = read_file(options.path, given)
    if seconds is not None:
        run = evolve(run, measured=Measured(seconds))
    opinion = second_opinion(run, cluster_of(run, job.gpus), job.memory_headroom)
    if result.as_json:
        from megaloom.planner.runs.to_json import opinion_json

        print(json.dumps(opinion_json(opinion, budget), indent=1))
    else:
        print(opinion_text(opinion))
        print(end=_long_run(opinion, budget))
    if result.html:
        from megaloom.planner.report.chrome_trace import write_file
        from megaloom.planner.runs.page import opinion_page

        write_file(opinion_page(opinion), result.html)
        if not result.as_json:
            print(f"\nwrote {result.html}")
    if options.patch:
        from megaloom.planner.runs.patch import write_patch

        told = write_patch(opinion, given, options.patch)
        if not result.as_json:
            print(f"\n{told}")
    return 1 if opinion.broken else 0


def _long_run(opinion: Opinion, budget: TokenBudget | None) -> str:
    """Return what the tokens of a budget take with the run's layout, and with the best one."""
    from megaloom.planner.report.run_cost import assumed_text, cost_text, training_cost

    if budget is None or opinion.plan is None:
        return ""
    plans = {"This run": opinion.plan, "Best": opinion.best}
    lines = [
        f"{name + ':':<10}{cost_text(training_cost(plan, opinion.run.model, budget), budget)}"
        for name, plan in plans.items()
        if plan is not None
    ]
    return "\n" + "".join(f"{line}\n" for line in (*lines, assumed_text(opinion.cluster)))


def cluster_of(run: TrainingRun, gpus: str | None) -> Cluster:
    """Return the cluster of a run: the kind that the user names, with the run's number of devices and machines."""
    from megaloom.planner.hardware.cluster_names import cluster

    if gpus is None and run.own is not None:
        return run.own.cluster
    if gpus is None:
        raise UserError(f"{run.path} does not state the kind of GPU\ngive it: --gpus {run.devices.count}xH100")
    named = gpus.strip()
    counted = named.lower().partition("x")[0].strip().isdigit()
    machine = cluster(named if counted else f"{run.devices.count}x{named}")
    each = run.devices.per_machine
    if each and not machine.source and each < machine.per_node and machine.count % each == 0:
        return evolve(machine, per_node=each)
    return machine
