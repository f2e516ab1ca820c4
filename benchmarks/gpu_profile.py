"""Show where the time of a step goes, by class of kernel: `python -m benchmarks.gpu_profile --gpus 1 --cases WORD ...`.

The cases are those of `gpu_runs`. Each is trained for a few steps, and torch's profiler records one more. The table has
milliseconds of the step on the first GPU: kernels of each class, and the time in which no kernel ran. Communication
beside other kernels counts only where nothing else ran. A second table has what the plan takes for the work of each
kind (`--planned` prints it alone, without a GPU). `--host` adds the functions and operators that took most time
of the host, for models whose kernels end before the host can launch the next ones; and where the GPU was idle longest,
and the lines at which the host waited for it.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import re
import time
import warnings
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_cases import CASES, Case, planned
from benchmarks.gpu_models import reference
from benchmarks.timed_steps import stepper
from megaloom.dsl.catalog import find
from megaloom.dsl.facts.costs import costs
from megaloom.dsl.graph import graph
from megaloom.planner.contract.plans import Plan
from megaloom.planner.cost.columns import CostColumn
from megaloom.planner.cost.cost_table import kernels_of
from megaloom.planner.search.pricing import Pricer
from megaloom.runtime.launch import launcher
from megaloom.runtime.megatron import device
from megaloom.runtime.training.chosen_backend import with_backend

WARM_UP = 6  # steps before the recorded one
KERNELS = 14  # that take most time, listed by name
GAPS = 14  # kernels before which the GPU was idle longest, listed by name
CLASSES = (
    ("communication", r"nccl"),
    ("attention", r"flash|fmha|flex_attention|sdpa|attention|cudnn.*(bprop|fprop)"),
    ("products of experts", r"[Gg]roup"),
    ("products", r"gemm|nvjet|cutlass|cublas|splitK|matmul"),
    ("optimizer", r"multi_tensor|Adam|FusedOptimizer"),
    ("copies and zeros", r"Memcpy|Memset|copy|fill|Fill|CatArray"),
    ("sorting and indexing", r"sort|index|gather|scatter|topk|cumsum|scan|radix|embedding"),
    ("compiled memory-bound", r"triton"),
)
"""Classes of kernels and what their names contain; the first that matches counts."""


@frozen
class KernelRun:
    """A kernel's name, and when it ran, in microseconds."""

    name: str
    start: float
    end: float


def class_of(name: str) -> str:
    """Return the class of a kernel."""
    return next((title for title, pattern in CLASSES if re.search(pattern, name)), "other")


def milliseconds(kernels: Iterable[KernelRun]) -> dict[str, float]:
    """Return for each class the time in which its kernels ran; each moment counts once, communication last."""
    found, reached = defaultdict[str, float](float), 0.0
    ordered = sorted(kernels, key=lambda k: k.start)
    compute = [k for k in ordered if class_of(k.name) != "communication"]
    busy = []
    for kernel in compute:
        start = max(kernel.start, reached)
        if kernel.end > start:
            found[class_of(kernel.name)] += (kernel.end - start) / 1e3
            busy.append((start, kernel.end))
            reached = kernel.end
    found["communication"] = exposed([k for k in ordered if class_of(k.name) == "communication"], busy) / 1e3
    return dict(found)


def exposed(kernels: Iterable[KernelRun], busy: Sequence[tuple[float, float]]) -> float:
    """Return how long these kernels ran while nothing in `busy` did, which is in order and does not overlap."""
    total, reached = 0.0, 0.0
    for kernel in kernels:
        start, end = max(kernel.start, reached), kernel.end
        if end <= start:
            continue
        reached = end
        total += end - start - sum(max(0.0, min(end, b) - max(start, a)) for a, b in busy)
    return total


def _show(name: str, plan: Plan, host: bool) -> None:
    """On each rank: profile a step of a case; rank 0 prints."""
    step = stepper(plan, WARM_UP + 5)
    for _ in range(WARM_UP):
        step()
    begun = time.perf_counter()
    step()
    took = time.perf_counter() - begun
    activities = [ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if host else [])]
    with profile(activities=activities) as recorded:
        step()
    functions = _functions(step) if host else ""
    waits = _waits(step) if host else []
    if dist.get_rank() == 0:
        print("\n".join((f"{name}: step {took * 1e3:.1f} ms", *_lines(recorded, took))), flush=True)
        if host:
            print("\n".join((*_gaps(recorded), *waits)))
            print(recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=45))
            print(functions, flush=True)


def _lines(recorded: profile, took: float) -> Iterator[str]:
    """Yield a line for each class of kernels, one for the time without, and the kernels that took most."""
    kernels = _kernels(recorded)
    found = milliseconds(kernels)
    for title, ms in sorted(found.items(), key=lambda pair: -pair[1]):
        yield f"    {title:<24} {ms:8.1f} ms"
    yield f"    {'no kernel':<24} {took * 1e3 - sum(found.values()):8.1f} ms"
    runs = defaultdict[str, list[float]](list)
    for k in kernels:
        runs[k.name].append((k.end - k.start) / 1e3)
    for name, each in sorted(runs.items(), key=lambda pair: -sum(pair[1]))[:KERNELS]:
        yield f"        {sum(each):8.2f} ms {len(each):>5} x {class_of(name):<22} {name[:90]}"


def _kernels(recorded: profile) -> list[KernelRun]:
    """Return the kernels of a recorded step, by their start."""
    kernels = [
        KernelRun(e.name, e.time_range.start, e.time_range.end)
        for e in recorded.events() or ()
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation
    ]
    return sorted(kernels, key=lambda k: k.start)


def idle_before(kernels: Sequence[KernelRun]) -> dict[str, list[float]]:
    """Return the milliseconds for which no kernel ran before each start of a kernel, by name. kernels: by start."""
    found, reached = defaultdict[str, list[float]](list), kernels[0].start if kernels else 0.0
    for kernel in kernels:
        if kernel.start > reached:
            found[kernel.name].append((kernel.start - reached) / 1e3)
        reached = max(reached, kernel.end)
    return dict(found)


def _gaps(recorded: profile) -> Iterator[str]:
    """Yield a line for each kernel before which the GPU was idle longest."""
    gaps = sorted(idle_before(_kernels(recorded)).items(), key=lambda pair: -sum(pair[1]))
    yield "    idle before:"
    for name, each in gaps[:GAPS]:
        yield f"        {sum(each):8.2f} ms {len(each):>5} x, longest {max(each):7.3f} ms  {name[:90]}"


def _waits(step: Callable[[], object]) -> list[str]:
    """Return the lines of Python at which the host waits for the GPU in a step, and how often."""
    if not device.gpu_count():
        return []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    lines = Counter(f"{w.filename}:{w.lineno}" for w in found if "synchroniz" in str(w.message))
    return ["    the host waits at:", *(f"        {count:>5} x {line}" for line, count in lines.most_common())]


def _functions(step: Callable[[], object]) -> str:
    """Return the functions that took most time of this thread in a step. Backward passes on a GPU run in another."""
    recorded = cProfile.Profile()
    recorded.enable()
    step()
    recorded.disable()
    text = io.StringIO()
    pstats.Stats(recorded, stream=text).strip_dirs().sort_stats("tottime").print_stats(30)
    return text.getvalue()


def planned_milliseconds(case: Case, plan: Plan) -> dict[str, float]:
    """Return the milliseconds that a plan takes for each kind of work in all micro-batches of a step.

    They are those of a device with all stages. Waits and weight gradients that kernels of their own add are "other".
    """
    pricer = Pricer(graph(find(reference(case.model))[0]), plan.cluster, plan.workload)
    job, x, found = pricer.cost_cache.job, case.layout, defaultdict[str, float](float)
    rows = pricer.cost_table(x).rows
    load = {"batch": x.micro_batch, "seq": case.seq, "source": case.seq}
    for kind, row, count in zip(job.structure.kinds, rows, np.bincount(job.structure.kind_of_node), strict=True):
        execution = job.execution(kind.node, x.split)
        facts = costs(kind.node, **load, split=x.split, losses=False, separate=not execution.module)
        times, left = 1e3 * int(count) * case.microbatches, row[CostColumn.FORWARD] + row[CostColumn.BACKWARD]
        for work, _, took in kernels_of(job, kind, facts, execution, x):
            seconds = took.forward + took.backward
            found[f"{work.kind} of experts" if work.experts else str(work.kind)] += times * seconds
            left -= seconds
        found["loss" if kind.has_loss else "other"] += times * left
    found["optimizer"] = 1e3 * plan.predicted.breakdown["optimizer"]
    return dict(found)


def _options() -> Namespace:
    parser = ArgumentParser("benchmarks.gpu_profile", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="profile cases of this many GPUs")
    parser.add_argument("--cases", nargs="+", required=True, metavar="WORD", help="those whose name has one of these")
    parser.add_argument("--host", action="store_true", help="print what took most time of the host, too")
    parser.add_argument("--planned", metavar="DEVICE", help="print what plans for such GPUs take, and run nothing")
    return parser.parse_args()


def main() -> None:
    asked = _options()
    cases = [c for c in CASES if c.gpus == asked.gpus and any(word in c.name for word in asked.cases)]
    name = asked.planned or device.local_cluster().partition("x")[2]
    for case in cases:
        plan = planned(case, name)
        if not asked.planned:
            launcher.run(_show, (case.name, with_backend(plan, case.backend), asked.host), plan.layout)
        print(f"{case.name}: planned {1e3 * plan.predicted.step_seconds:.1f} ms")
        for title, ms in sorted(planned_milliseconds(case, plan).items(), key=lambda pair: -pair[1]):
            print(f"    {title:<34} {ms:8.1f} ms")


if __name__ == "__main__":
    main()
