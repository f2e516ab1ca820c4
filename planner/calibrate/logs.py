"""Measured runs from logs: what was run, on what, and how long its steps took.

A log of Megatron-LM states its run. Another log needs the file that started it: `train.yaml=train.log`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import evolve, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import graph
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.workload import Runtime
from megaloom.planner.runs.iterations import LogProgram, allocated_ratio, iterations_of, max_allocated, measured_step
from megaloom.planner.runs.megatron.log import is_log
from megaloom.planner.runs.opinion import broken_rules, with_stages
from megaloom.planner.runs.read import RunInputs, file_text, read_file, read_text
from megaloom.planner.runs.run import Measured, TrainingRun
from megaloom.planner.search.pricing import Pricer

from .gpu_names import check_named_gpus
from .observed import Observed

LEAST_RUNS = 2  # each is predicted from the others


@frozen
class LoggedRun:
    """A run as its log and its file state it, with its measured step."""

    run: TrainingRun
    measured: Measured
    observed: Observed


ClusterOf = Callable[[TrainingRun], Cluster]
"""Function that returns the cluster of a run, of the kind that the user names."""


def read_logs(names: Sequence[str], given: RunInputs, cluster_of: ClusterOf) -> tuple[LoggedRun, ...]:
    """Return the runs of these logs, each LOG or RUN=LOG. Raise UserError for one that is none."""
    logs = [log for _, log in map(_files, names)]
    if twice := next((log for n, log in enumerate(logs) if log in logs[:n]), None):
        raise UserError(f"{twice} is given twice\ngive each run once, since each is predicted from the others")
    if len(names) < LEAST_RUNS:
        raise UserError(
            f"calibration needs the logs of at least {LEAST_RUNS} runs, got {len(names)}\n"
            "each run is predicted from the others; runs with other layouts, sizes or numbers of GPUs tell most"
        )
    runs = tuple(_logged(*_files(name), given, cluster_of) for name in names)
    node_size(runs)
    return runs


def _files(name: str) -> tuple[str | None, str]:
    """Return the file of a run, if one is given, and its log."""
    if Path(name).is_file() or "=" not in name:
        return None, name
    run, _, log = name.partition("=")
    return run, log


def _logged(run_path: str | None, path: str, given: RunInputs, cluster_of: ClusterOf) -> LoggedRun:
    text = file_text(path)
    lines = text.splitlines()
    program, printed = iterations_of(lines)
    if program is None:
        raise UserError(
            f"{path} has no iterations that are understood\nlogs of {', '.join(LogProgram)} print the time of each"
        )
    if run_path is None and not is_log(text):
        raise UserError(
            f"{path} is a log of {program}, which does not state its model and layout\n"
            f"give the file that started it before it: RUN={path}"
        )
    try:
        if run_path is None:
            run = read_text(text, path, evolve(given, devices=None))  # a log states their number
        else:
            run = read_file(run_path, given)
    except UserError as error:
        named = run_path or path
        raise error if named in str(error) else UserError(f"{named}: {error}") from None
    if run.runtime is not Runtime.MEGATRON:
        raise UserError(f"{run_path} is a plan for `megaloom train`\ncalibration takes runs of Megatron-core")
    machine = cluster_of(run)
    check_named_gpus(text, path, machine)
    if program is LogProgram.TITAN:
        tokens = run.workload.tokens / run.layout.world
        printed = [evolve(one, seconds=one.seconds * tokens) for one in printed]
    measured = measured_step(printed, max_allocated(lines), path, run.workload.batch)
    if measured is None:
        raise UserError(f"{path} has no iterations with the run's batch of {run.workload.batch}")
    return LoggedRun(run, measured, observed(run, measured, path, machine))


def observed(run: TrainingRun, measured: Measured, name: str, machine: Cluster) -> Observed:
    """Return a run with its measured step and memory. Raise UserError if its layout is illegal."""
    g = graph(run.model)
    for broken in broken_rules(run, g, machine):
        raise UserError(f"{name}: {broken.message} [{broken.rule}]\nleave this run out")
    staged = with_stages(g, run)

    def pricer(cluster: Cluster) -> Pricer:
        return Pricer(staged, cluster, run.workload, run.profile)

    here = pricer(machine)
    return Observed(
        name=name,
        cluster=machine,
        layout=run.layout,
        run_class=here.cost_cache.job.run_class,
        seconds=measured.seconds,
        seconds_on=lambda cluster: pricer(cluster).price(run.layout).seconds,
        memory=allocated_ratio(measured, run.layout, here.price(run.layout).prediction.nbytes),
    )


def node_size(runs: Sequence[LoggedRun]) -> int | None:
    """Return the GPUs of a node, as the files of runs on several nodes state them; None if none does.

    Raise UserError if they state different numbers.
    """
    stated = {one.run.devices.per_machine: one.observed.name for one in runs if one.observed.cluster.nodes > 1}
    sizes = sorted((size, name) for size, name in stated.items() if size)
    if len(sizes) > 1:
        (few, one), (many, other) = sizes[0], sizes[-1]
        raise UserError(
            f"{one} ran on nodes of {few} GPUs, {other} on nodes of {many}\ncalibrate each kind of node by itself"
        )
    return sizes[0][0] if sizes else None
