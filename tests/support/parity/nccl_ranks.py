"""The ranks of `nccl_table`: references that each computes alone, and cases that both compute.

A rank that fails waits a little for the other one to fail too. Then both go on with the next case; else it ends its
process, because the other one waits in a collective.
"""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, evolve, frozen

from benchmarks.time_limit import process_time_limit
from megaloom.dsl import Model, graph
from megaloom.planner.contract.choices import Shard
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.runtime.megatron import device
from megaloom.runtime.training.verify import (
    NOISE_MARGIN,
    Comparison,
    Curve,
    ShortRun,
    gradient_differences,
    noise_of_alike,
    rounding_noise,
    single_process,
    tolerance,
)
from tests.support.models.gpu import SEQ, WIDE
from tests.support.parity.drawn import priced
from tests.support.parity.nccl_rows import Key, Row, append, failed
from tests.support.parity.rank_pool import process_group

RANKS, BATCH, STEPS, SEED = 2, 4, 3, 1234
RUNNING = "running"  # a file with the case that runs
GRACE = timedelta(seconds=10)  # for the other rank to end too, after one has failed
OVERLAPS = ("gradients", "weights")
LAYOUTS = {
    "DP2": Layout(dp=2, overlaps=("gradients",)),
    "DP2 optimizer": Layout(dp=2, shard=Shard.OPTIMIZER, overlaps=OVERLAPS),
    "DP2 gradients": Layout(dp=2, shard=Shard.GRADIENTS, overlaps=OVERLAPS),
    "DP2 weights": Layout(dp=2, shard=Shard.WEIGHTS, overlaps=OVERLAPS),
    "TP2 SP": Layout(tp=2, sequence_parallel=True, vocab_multiple=128),
    "PP2 VPP2": Layout(pp=2, vpp=2),
    "CP2": Layout(cp=2),
    "EP2": Layout(dp=2, ep=2),
}

Gradients = dict[str, tuple[torch.Tensor, float]]


@frozen
class Job:
    """The options of a command that its ranks read."""

    gpu: str  # its name as the planner knows it
    output: Path
    timeout: float  # seconds of a case
    until: float  # time.monotonic(), one clock for all processes, after which no case begins
    deterministic: bool = True
    folder: Path = Path()  # of references


@frozen(eq=False)
class Expected:
    """Results of one process: losses, norms, gradients of the first step, and their change when weights are rounded."""

    curve: Curve
    gradients: dict[str, torch.Tensor]
    noise: dict[str, float]
    norm_noise: float


@cache
def model_of(family: str) -> Model:
    """Return the model of a family, one object for all cases of this process."""
    return WIDE[family]()


@cache
def _plan(family: str, layout: str, gpu: str) -> Plan:
    return priced(model_of(family), LAYOUTS[layout], Workload(seq=SEQ, batch=BATCH), device=gpu)


def plan_of(key: Key, gpu: str) -> Plan:
    """Return the plan of a case. Its stages do not depend on the precision."""
    plan = _plan(key.family, key.layout, gpu)
    return evolve(plan, workload=evolve(plan.workload, precision=Precision(key.precision)))


def work(keys: Sequence[Key], job: Job) -> None:
    """On each rank: compute its references, then all cases with the other rank, until the time is over."""
    store: Any = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    dist.destroy_process_group()
    _compute_exactly(job.deterministic)
    needed = dict.fromkeys((key.family, key.precision) for key in keys)
    with process_group(store, f"alone {rank}", 0, 1):
        for family, precision in list(needed)[rank::RANKS]:
            if time.monotonic() < job.until:
                _write_reference(Key(family, "DP2", precision), job)
    for layout, some in groupby(keys, key=lambda key: key.layout):
        with process_group(store, layout, rank, RANKS):
            for key in some:
                if rank == 0:
                    store.set(f"begins {key}", "yes" if time.monotonic() < job.until else "no")
                if store.get(f"begins {key}") == b"no":
                    return
                _run_case(store, key, job)
        gc.collect()


def _compute_exactly(deterministic: bool) -> None:
    """Use no TF32, and if asked for, deterministic kernels where there are any. Compile for as many shapes as come."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
    if device.gpu_count():
        torch._dynamo.config.cache_size_limit = 1000
        torch._dynamo.config.accumulated_cache_size_limit = 10_000


def _write_reference(key: Key, job: Job) -> None:
    """Write what one process computes into a file, or the error that ends it."""
    file = _reference_file(job.folder, key)
    if file.exists():
        return
    torch.save("one process did not compute this model to its end", file)  # for the next start of the ranks
    with process_time_limit(2 * job.timeout, lambda: None):  # it compiles kernels
        found = _attempt(partial(_reference, key, job.gpu))
    torch.save(found, file)


def _reference_file(folder: Path, key: Key) -> Path:
    return folder / f"{key.family}-{key.precision}.pt"


def _reference(key: Key, gpu: str) -> Expected:
    """Return what one process computes."""
    model = model_of(key.family)
    run = ShortRun.of(single_process(plan_of(key, gpu), model), model, STEPS, SEED)
    rounded = run.rounded_gradients()
    gradients, curve = run.gradients_and_curve(STEPS)
    assert gradients is not None and rounded is not None
    values = {name: g.value.cpu() for name, g in gradients.items()}
    noise = noise_of_alike(rounding_noise(gradients, rounded), values)
    norm, other = (sum(float(g.value.double().square().sum()) for g in x.values()) ** 0.5 for x in (gradients, rounded))
    return Expected(curve, values, noise, abs(norm - other) / max(1.0, norm))


def running(folder: Path) -> Key | None:
    """Return the case that the ranks run, or ran when they were ended."""
    file = folder / RUNNING
    return Key(**json.loads(file.read_text())) if file.exists() else None


def _run_case(store: Any, key: Key, job: Job) -> None:
    """Run a case with the other rank; rank 0 appends its result. End the process if the ranks are no longer in step."""
    rank, began = dist.get_rank(), time.monotonic()
    expected: Any = torch.load(_reference_file(job.folder, key), weights_only=False)
    if rank == 0:
        (job.folder / RUNNING).write_text(json.dumps(asdict(key)))
    if isinstance(expected, str):
        error = f"one process: {expected}"
    else:
        late = failed(key, f"it did not end within {job.timeout:g} s")
        with process_time_limit(job.timeout, lambda: rank == 0 and append(job.output, late)):
            found = _attempt(partial(_planned, key, job.gpu))
            error = _first_error(store, key, found if isinstance(found, str) else "", job)
    if rank == 0:
        row = failed(key, error) if error else _compared(key, found, expected)
        row = evolve(row, gpus=f"{RANKS}x{job.gpu}", seconds=round(time.monotonic() - began, 2))
        append(job.output, row)
        (job.folder / RUNNING).unlink()
        print(f"{row.line}  ({row.seconds:.1f} s)", flush=True)


def _first_error(store: Any, key: Key, own: str, job: Job) -> str:
    """Return the error of the first rank that has one, or "", once both have ended a case.

    After an error of this rank alone, append it and end this process: the other one waits in a collective.
    """
    names = [f"ended {key} {rank}" for rank in range(RANKS)]
    store.set(names[dist.get_rank()], own)
    try:
        store.wait(names, GRACE if own else timedelta(seconds=job.timeout))
        in_step = not own or _device_works()
    except RuntimeError:
        in_step = False
    if own and not in_step:
        append(job.output, failed(key, own))
        os._exit(1)
    return next(filter(None, (store.get(name).decode() for name in names)), "")


def _attempt(call: Callable[[], Any]) -> Any:
    """Return the value of a call, or its error with the traceback."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"


def _device_works() -> bool:
    """Return whether the device computes; an illegal access to its memory ends that for the whole process."""
    try:
        if device.gpu_count():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _planned(key: Key, gpu: str) -> tuple[Curve, Gradients | None]:
    """Return the curve under the plan, and on rank 0 the gradients with what ranks disagree on."""
    run = ShortRun.of(plan_of(key, gpu), model_of(key.family), STEPS, SEED)
    gradients, curve = run.gradients_and_curve(STEPS)
    return curve, gradients and {name: (g.value.cpu(), g.disagreement) for name, g in gradients.items()}


def _compared(key: Key, found: tuple[Curve, Gradients], expected: Expected) -> Row:
    """Return the differences of a case from one process."""
    (curve, gradients), precision = found, Precision(key.precision)
    g, margin = graph(model_of(key.family)), NOISE_MARGIN[precision]
    differences = gradient_differences(g, gradients, expected.gradients, expected.noise, precision)
    limit, noise = tolerance(precision), expected.norm_noise
    both = Comparison(curve, expected.curve, limit, differences, norm_noise=noise, noise_margin=margin)
    return Row.of(
        key,
        loss_error=both.loss_error,
        norm_error=both.norm_error,
        gradient_error=both.gradient_error,
        weight=max(differences, key=lambda d: d.relative).weight,
        losses=curve.losses,
        tolerance=limit,
        agrees=both.agrees,
    )
