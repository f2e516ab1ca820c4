"""The predicted step as Chrome trace events, which ui.perfetto.dev and chrome://tracing open.

`replay` simulates a plan's own stages, `trace_json` returns the text of the trace. A process of the trace is a
pipeline rank, with a thread for computation, threads for sends, and a counter for memory.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Graph
from megaloom.planner.contract.devices import GiB
from megaloom.planner.contract.plans import Plan, PlanError, plan_command
from megaloom.planner.cost.profiles.frameworks import PROFILES
from megaloom.planner.partition.partitioner import Partition, PartitionProblem
from megaloom.planner.pipeline.timeline import Event, Timeline
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.simulate.memory_timeline import Slice, memory_levels, memory_tracks
from megaloom.planner.simulate.price import Priced

from .tables import stage_contents

COMPUTE_THREAD, SEND_THREAD = 1, 2  # sends that overlap in time take threads 3, 4, …
SAME_SECONDS = 1e-9  # relative: a plan's file and its replay add the same seconds in another order


def replay(plan: Plan, graph: Graph) -> Priced:
    """Simulate the plan's own stages. Raises PlanError if the step time is not the one in the plan."""
    pricer = Pricer(graph, plan.cluster, plan.workload, PROFILES[plan.runtime])
    problem = PartitionProblem(plan.layout, pricer.cost_table(plan.layout), pricer.capacity)
    priced = pricer.simulate(Partition(problem, (0, *(stage.stop for stage in plan.stages))))
    if not math.isclose(priced.seconds, plan.predicted.step_seconds, rel_tol=SAME_SECONDS):
        raise PlanError(
            f"the plan was made with another cost model: it predicts {plan.predicted.step_seconds:.6g} s a step, "
            f"this version {priced.seconds:.6g} s\nplan again: {plan_command(plan)}"
        )
    return priced


def end_of_step_slices(priced: Priced) -> tuple[tuple[Slice, ...], ...]:
    """Return the slices of each pipeline rank after its last micro-batch; the last slice of all ends the step.

    Every rank reduces its gradients, then waits for all ranks, because the gradient norm needs all gradients.
    """
    ends = priced.timeline.ends
    reduced = [
        (end + last.reduction, end + last.reduction + last.tied)
        for end, last in zip(ends, priced.ends_of_step, strict=True)
    ]
    norm = max(both for _, both in reduced)
    rows = []
    for end, (own, both), last in zip(ends, reduced, priced.ends_of_step, strict=True):
        updated = norm + last.optimizer
        rows.append(
            (
                Slice("gradient reduction", end, own),
                Slice("tied gradients", own, both),
                Slice("optimizer", norm, updated),
                Slice("weight gather", updated, updated + last.gathering),
            )
        )
    return tuple(tuple(s for s in row if s.end > s.start) for row in rows)


def trace_events(plan: Plan, priced: Priced, graph: Graph) -> Iterator[dict[str, Any]]:
    """Yield the trace events of the step. Times are in microseconds.

    Source of the format: "Trace Event Format", the document that chrome://tracing links to.
    """
    timeline, pp = priced.timeline, plan.layout.pp
    for rank, (events, after, track) in enumerate(
        zip(timeline.events, end_of_step_slices(priced), memory_tracks(priced), strict=True)
    ):
        stages = [s for s in plan.stages if s.rank == rank]
        layers = "; ".join(stage_contents(graph.nodes[s.start : s.stop], graph) for s in stages)
        yield from _named(rank, "process", f"pipeline rank {rank}")
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_labels", "args": {"labels": layers}}
        yield from _named(rank, "thread", "compute", COMPUTE_THREAD)
        for step, start, end in events:
            args = {"microbatch": step.microbatch, "chunk": step.stage // pp, "stage": step.stage}
            yield _complete(rank, COMPUTE_THREAD, Slice("backward" if step.backward else "forward", start, end), args)
        yield from (_complete(rank, COMPUTE_THREAD, slice, {}) for slice in after)
        yield from _sends(timeline, events, rank, pp)
        for moment, nbytes in memory_levels(track, events, after, pp):
            fill = {"GiB": round(nbytes / GiB, 6)}
            yield {"ph": "C", "pid": rank, "tid": 0, "name": "memory", "ts": _micro(moment), "args": fill}


def _sends(timeline: Timeline, events: Iterable[Event], rank: int, pp: int) -> Iterator[dict[str, Any]]:
    """Yield the sends of a rank to its neighbours, each in the first thread that is free."""
    free: list[float] = []
    for step, _, start in events:
        to = step.stage + (-1 if step.backward else 1)
        if not 0 <= to < len(timeline.forward) or pp == 1:
            continue
        end = start + timeline.transfer[min(to, step.stage)]
        lane = next((i for i, until in enumerate(free) if until <= start), len(free))
        if lane == len(free):
            free.append(0.0)
            yield from _named(rank, "thread", "send" if lane == 0 else f"send {lane + 1}", SEND_THREAD + lane)
        free[lane] = end
        args = {"microbatch": step.microbatch, "to_rank": to % pp, "to_stage": to}
        name = "send gradient" if step.backward else "send activation"
        yield _complete(rank, SEND_THREAD + lane, Slice(name, start, end), args)


def _named(rank: int, what: str, name: str, thread: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the name of a process or thread, and its position in the viewer."""
    position = rank if what == "process" else thread
    for key, args in ((f"{what}_name", {"name": name}), (f"{what}_sort_index", {"sort_index": position})):
        yield {"ph": "M", "pid": rank, "tid": thread, "name": key, "args": args}


def _complete(rank: int, thread: int, it: Slice, args: dict[str, int]) -> dict[str, Any]:
    """Return an event with its duration. Its end is rounded like a start, so that neighbours touch."""
    start = _micro(it.start)
    duration = round(_micro(it.end) - start, 3)
    return {
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "cat": "step",
        "name": it.name,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def trace_json(plan: Plan, priced: Priced, graph: Graph) -> str:
    """Return the trace as JSON, one event per line."""
    about = {
        "model": plan.model,
        "gpus": str(plan.cluster),
        "layout": str(plan.layout),
        "step_seconds": plan.predicted.step_seconds,
        "microbatches": priced.timeline.microbatches,
    }
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode
    events = ",\n".join(map(encode, trace_events(plan, priced, graph)))
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n{events}\n]}}\n'


def write_file(text: str, path: str) -> None:
    """Write a file, compressed if its name ends in .gz. Raises UserError if it cannot be written."""
    data = text.encode(errors="backslashreplace")
    try:
        Path(path).write_bytes(gzip.compress(data, mtime=0) if path.endswith(".gz") else data)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}\ngive a file in a directory that exists") from None
