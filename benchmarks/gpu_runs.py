"""Run cases with a fixed layout on the GPUs at hand, and compare with plans: `python -m benchmarks.gpu_runs --gpus 1`.

The ranks start once for all cases with one environment, and once more for those with sharded weights, which have more
connections to the GPU. They run the cases one after the other: each is built, trained for a few steps on random tokens
with routers that choose experts at random, and freed. Its result is appended to a file (`--output`) before the next
case begins, so a cut-off loses only the case that runs. A case that fails or takes longer than `--timeout` is recorded
with its error, and the ranks start again for the rest. A case that the file or the repository has a run of, on the same
GPUs, is left out (without `--again`, which looks at the file alone): the same command goes on where it was cut off.

A start takes 20 to 40 s and a case 15 to 40 s, as measured of single runs on an H100: with the default `--limit`, 12 to
20 cases a command of ten minutes. `--list` prints the cases, `--report` compares all runs with what the planner of
today predicts.
"""

from __future__ import annotations

import gc
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from attrs import frozen

from benchmarks.gpu_cases import CASES, Case, planned
from benchmarks.gpu_report import MACHINES, RESULTS, THIS_COMMAND, Measured, append, read, report
from benchmarks.time_limit import process_time_limit
from benchmarks.timed_steps import timed_steps
from megaloom.dsl.errors import UserError
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.launch import launcher
from megaloom.runtime.launch.rank_environment import connections
from megaloom.runtime.megatron import device
from megaloom.runtime.training.chosen_backend import with_backend

GiB = 2**30
LARGE = 2**26  # bytes of a tensor that is freed; caches and workspaces of the libraries are smaller
OWN_STORAGE = (torch.Tensor, torch.nn.Parameter)  # and not DTensor
LIBRARIES = ("torch", "megatron-core", "transformer-engine")
Mesh = tuple[int, ...]


@frozen
class Budget:
    """Steps of each case, and seconds that cases may take."""

    steps: int
    case: float  # seconds of one case
    last: float  # seconds after the command began from which on no case begins
    uncounted: int = 4  # first steps, which compile kernels and fill the allocator
    machine: str = ""  # the profile of the machine, for each result


def run(cases: Sequence[Case], name: str, output: Path, budget: Budget, *, again: bool = False) -> None:
    """Measure cases of one number of devices of this name, and append the result of each to a file.

    again: measure cases that the repository has a run of, too.
    """
    known = [] if again else [row for row in read(RESULTS) if not row.error and row.origin == THIS_COMMAND]
    began = time.monotonic()
    left = [(case, plan) for case, plan in _plans(cases, name) if not _has_run(case, name, [*read(output), *known])]
    left.sort(key=lambda pair: (connections(pair[1].layout), _mesh(pair[1])))
    while left and (seconds := budget.last - (time.monotonic() - began)) > 0:
        before, first = len(read(output)), left[0][1].layout
        alike = [pair for pair in left if connections(pair[1].layout) == connections(first)]
        try:
            launcher.run(_measure_all, (alike, name, str(output), budget, seconds), first)
            failure = ""
        except (UserError, launcher.RankError) as error:
            failure = str(error).strip().splitlines()[-1]
        rows = read(output)[before:]
        left = [pair for pair in left if pair[0].name not in {row.case for row in rows}]
        if failure and not any(row.error for row in rows):  # of the case that ran
            append(output, Measured(case=left.pop(0)[0].name, gpus=_gpus(cases[0], name), error=failure))
        elif not failure and len(rows) < len(alike):  # the time is over
            break
    for case, _ in left:
        print(f"left for the next command: {case.name}", flush=True)


def _plans(cases: Sequence[Case], name: str) -> Iterator[tuple[Case, Plan]]:
    """Yield each case with its plan; say of the others why this machine cannot run them."""
    for case in cases:
        try:
            yield case, with_backend(planned(case, name), case.backend)
        except UserError as error:
            print(f"left out: {case.name}: {str(error).splitlines()[0]}", flush=True)


def _has_run(case: Case, name: str, known: Sequence[Measured]) -> bool:
    """Return whether there is a run of a case on these devices."""
    return any((row.case, row.gpus) == (case.name, _gpus(case, name)) for row in known)


def _gpus(case: Case, name: str) -> str:
    return f"{case.gpus}x{name}"


def _mesh(plan: Plan) -> Mesh:
    """Return the degrees of a plan's process groups."""
    x = plan.layout
    return x.tp, x.pp, x.vpp, x.cp, x.ep, x.etp


def _measure_all(left: Sequence[tuple[Case, Plan]], name: str, output: str, budget: Budget, seconds: float) -> None:
    """On each rank: run cases until these seconds have passed; rank 0 appends their results."""
    began, mesh = time.monotonic(), _mesh(left[0][1])
    for case, plan in left:
        if not _goes_on(time.monotonic() - began < seconds):
            return
        if _mesh(plan) != mesh:
            _destroy_groups()
            mesh = _mesh(plan)
        late = Measured(case=case.name, gpus=_gpus(case, name), error=f"it did not end within {budget.case:g} s")
        with process_time_limit(budget.case, partial(_append, output, late)):
            result = measured(case, plan, _gpus(case, name), budget)
        _append(output, result)
        if dist.get_rank() == 0:
            print(f"{result.step_seconds:8.3f} s {result.memory_gib:6.1f} GiB  {case.name}", flush=True)


def measured(case: Case, plan: Plan, gpus: str, budget: Budget) -> Measured:
    """Return the median step and the most memory of any rank of a case, whose model is freed again."""
    if device.gpu_count():
        torch.cuda.reset_peak_memory_stats()
    took = list(timed_steps(plan, budget.steps, balanced=True))[budget.uncounted :]
    reserved = torch.cuda.max_memory_reserved() if device.gpu_count() else 0
    most = torch.tensor([device.peak_memory(), reserved], dtype=torch.float64, device=device.current())
    dist.all_reduce(most, dist.ReduceOp.MAX)
    _free()
    allocated_gib, reserved_gib = (most / GiB).tolist()
    return Measured(
        case=case.name,
        gpus=gpus,
        libraries=", ".join(_libraries()),
        date=date.today().isoformat(),
        steps=len(took),
        machine=budget.machine,
        step_seconds=round(median(took), 5),
        memory_gib=round(allocated_gib, 3),
        reserved_gib=round(reserved_gib, 3),
    )


def _free() -> None:
    """Free what a case has left on the device.

    megatron-core holds a model in cycles that pass through C++, which Python cannot collect: hooks on gradients refer
    to the model. So the memory of each parameter, of the optimizer's state and of each large tensor is freed, and the
    small remains stay. A tensor that megatron-core would use again is forgotten first.
    """
    from megatron.core import parallel_state

    parallel_state.get_global_memory_buffer().buffer.clear()
    gc.collect()
    torch._dynamo.reset()  # else the shapes of many cases would be too many for one function
    if device.gpu_count():
        for tensor in [t for one in gc.get_objects() for t in _left(one) if t.is_cuda]:
            tensor.untyped_storage().resize_(0)
        torch.cuda.empty_cache()


def _left(one: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a case in an object: it itself, if it is a parameter or large; an optimizer's state."""
    if isinstance(one, torch.optim.Optimizer):
        state = (t for of in one.state.values() for t in of.values())
        masters = (p for group in one.param_groups for p in group["params"])
        yield from (t for t in (*state, *masters) if type(t) in OWN_STORAGE)
    elif type(one) is torch.nn.Parameter or (type(one) in OWN_STORAGE and _is_large(one)):
        yield one


def _is_large(x: torch.Tensor) -> bool:
    return x.is_cuda and x.untyped_storage().nbytes() >= LARGE


def _goes_on(here: bool) -> bool:
    """Return what rank 0 says, so that all ranks do the same."""
    flag = torch.tensor([here], dtype=torch.int32, device=device.current())
    dist.broadcast(flag, 0)
    return bool(flag.item())


def _destroy_groups() -> None:
    """Destroy all process groups but that of all ranks, with the memory of their communicators."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    for group in [g for g in dist.distributed_c10d._world.pg_map if g is not dist.group.WORLD]:
        dist.destroy_process_group(group)


def _append(output: str, result: Measured) -> None:
    """Append a result to the file on rank 0."""
    if dist.get_rank() == 0:
        append(Path(output), result)


def _libraries() -> Iterator[str]:
    for name in LIBRARIES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def options() -> Namespace:
    """Return the options of the command line."""
    parser = ArgumentParser("benchmarks.gpu_runs", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="run the cases of this many GPUs")
    parser.add_argument("--cases", nargs="+", default=[], metavar="WORD", help="only those whose name has one of these")
    parser.add_argument("--output", type=Path, default=Path("gpu_case_runs.tsv"), help="file of results to append to")
    parser.add_argument("--steps", type=int, default=12, help="steps of a case")
    parser.add_argument("--timeout", type=float, default=120, help="seconds of a case")
    parser.add_argument("--limit", type=float, default=450, help="seconds after which no case begins")
    parser.add_argument("--machine", default="", metavar="FILE", help=f"profile of this machine, a file of {MACHINES}")
    parser.add_argument("--again", action="store_true", help="run cases that the repository has a run of, too")
    parser.add_argument("--list", action="store_true", help="print the cases")
    parser.add_argument("--report", action="store_true", help="compare the results of all runs with plans")
    return parser.parse_args()


def main() -> None:
    asked = options()
    cases = [c for c in CASES if not asked.cases or any(word in c.name for word in asked.cases)]
    if asked.report:
        print(report([*read(RESULTS), *read(asked.output)], cases))
        return
    cases = [case for case in cases if case.gpus == asked.gpus]
    if asked.list:
        print("\n".join(f"{case.name}  {'held out' if case.held_out else ''}".rstrip() for case in cases))
        return
    if device.gpu_count() < asked.gpus:
        raise SystemExit(f"--gpus {asked.gpus}: this machine has {device.gpu_count()} GPUs")
    budget = Budget(steps=asked.steps, case=asked.timeout, last=asked.limit, machine=Path(asked.machine).name)
    run(cases, device.local_cluster().partition("x")[2], asked.output, budget, again=asked.again)
    print(report(read(asked.output), cases))


if __name__ == "__main__":
    main()
