"""The predicted step as Chrome's trace events, which ui.perfetto.dev and chrome://tracing open.

Protocol: `replayed` is the price of a plan's own stages, `tails` what a timeline leaves out of it, `chrome` the events,
`dumps` the text of a file. A process is a pipeline rank: what it computes, what it sends, how much memory it fills.
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
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.simulate.memory_timeline import Slice, memory_levels, memory_tracks
from megaloom.planner.simulate.price import Priced
from megaloom.planner.simulate.timeline import Event, Timeline

from .text import holds

COMPUTE, SENDS = 1, 2  # threads; sends that overlap take more of them
CLOSE = 1e-9  # seconds are added up in another order


def replayed(plan: Plan, graph: Graph) -> Priced:
    """The price of the plan's own stages. Raises PlanError if that is no longer what the plan says."""
    pricer = Pricer(graph, plan.cluster, plan.workload, PROFILES[plan.runtime])
    fit = PartitionProblem(plan.layout, pricer.cost_table(plan.layout), pricer.capacity)
    priced = pricer.simulate(Partition(fit, (0, *(stage.stop for stage in plan.stages))))
    if not math.isclose(priced.seconds, plan.predicted.step_seconds, rel_tol=CLOSE):
        raise PlanError(
            f"the plan predicts {plan.predicted.step_seconds:.6g} s a step, this megaloom {priced.seconds:.6g} s\n"
            f"its costs have changed since; plan it again: {plan_command(plan)}"
        )
    return priced


def tails(priced: Priced) -> tuple[tuple[Slice, ...], ...]:
    """What each pipeline rank does after its micro-batches; the last of them ends with the step.

    A rank's own gradients, then the norm of all, for which it waits until every rank has reduced its own.
    """
    ends = priced.timeline.ends
    reduced = [
        (end + tail.reduction, end + tail.reduction + tail.tied)
        for end, tail in zip(ends, priced.ends_of_step, strict=True)
    ]
    norm = max(both for _, both in reduced)
    rows = []
    for end, (own, both), tail in zip(ends, reduced, priced.ends_of_step, strict=True):
        updated = norm + tail.optimizer
        rows.append(
            (
                Slice("gradient reduction", end, own),
                Slice("tied gradients", own, both),
                Slice("optimizer", norm, updated),
                Slice("weight gathering", updated, updated + tail.gathering),
            )
        )
    return tuple(tuple(s for s in row if s.end > s.start) for row in rows)


def chrome(plan: Plan, priced: Priced, graph: Graph) -> Iterator[dict[str, Any]]:
    """The events of the step, times in microseconds.

    Source of the format: "Trace Event Format", the document that chrome://tracing links to.
    """
    line, pp = priced.timeline, plan.layout.pp
    for rank, (events, after, track) in enumerate(zip(line.events, tails(priced), memory_tracks(priced), strict=True)):
        stages = [s for s in plan.stages if s.rank == rank]
        said = "; ".join(holds(graph.nodes[s.start : s.stop], graph) for s in stages)
        yield from _named(rank, "process", f"pipeline rank {rank}")
        yield {"ph": "M", "pid": rank, "tid": 0, "name": "process_labels", "args": {"labels": said}}
        yield from _named(rank, "thread", "compute", COMPUTE)
        for step, start, end in events:
            args = {"microbatch": step.microbatch, "chunk": step.stage // pp, "stage": step.stage}
            yield _complete(rank, COMPUTE, Slice("backward" if step.backward else "forward", start, end), args)
        yield from (_complete(rank, COMPUTE, slice, {}) for slice in after)
        yield from _sends(line, events, rank, pp)
        for moment, nbytes in memory_levels(track, events, after, pp):
            fill = {"GiB": round(nbytes / GiB, 6)}
            yield {"ph": "C", "pid": rank, "tid": 0, "name": "memory", "ts": _micro(moment), "args": fill}


def _sends(line: Timeline, events: Iterable[Event], rank: int, pp: int) -> Iterator[dict[str, Any]]:
    """What a rank sends to its neighbours, each in the first of its lanes that is free."""
    free: list[float] = []
    for step, _, start in events:
        to = step.stage + (-1 if step.backward else 1)
        if not 0 <= to < len(line.forward) or pp == 1:
            continue
        end = start + line.transfer[min(to, step.stage)]
        lane = next((i for i, until in enumerate(free) if until <= start), len(free))
        if lane == len(free):
            free.append(0.0)
            yield from _named(rank, "thread", "send" if lane == 0 else f"send {lane + 1}", SENDS + lane)
        free[lane] = end
        args = {"microbatch": step.microbatch, "to_rank": to % pp, "to_stage": to}
        name = "send gradient" if step.backward else "send activation"
        yield _complete(rank, SENDS + lane, Slice(name, start, end), args)


def _named(rank: int, what: str, name: str, thread: int = 0) -> Iterator[dict[str, Any]]:
    """The name of a process or thread, and its place among its like."""
    place = rank if what == "process" else thread
    for key, args in ((f"{what}_name", {"name": name}), (f"{what}_sort_index", {"sort_index": place})):
        yield {"ph": "M", "pid": rank, "tid": thread, "name": key, "args": args}


def _complete(rank: int, thread: int, it: Slice, args: dict[str, int]) -> dict[str, Any]:
    """An event with its duration: what ends as another begins is rounded as that is."""
    start = _micro(it.start)
    took = round(_micro(it.end) - start, 3)
    return {
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "cat": "step",
        "name": it.name,
        "ts": start,
        "dur": took,
        "args": args,
    }


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def dumps(plan: Plan, priced: Priced, graph: Graph) -> str:
    """The trace as JSON, an event a line."""
    about = {
        "model": plan.model,
        "gpus": str(plan.cluster),
        "layout": str(plan.layout),
        "step_seconds": plan.predicted.step_seconds,
        "microbatches": priced.timeline.microbatches,
    }
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode
    events = ",\n".join(map(encode, chrome(plan, priced, graph)))
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n{events}\n]}}\n'


def write(text: str, path: str) -> None:
    """Write a file, compressed if its name ends in .gz. Raises UserError where that cannot be."""
    data = text.encode()
    try:
        Path(path).write_bytes(gzip.compress(data, mtime=0) if path.endswith(".gz") else data)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}\ngive a file in a directory that exists") from None
