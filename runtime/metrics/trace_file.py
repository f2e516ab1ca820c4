"""The trace of a measured step, as Chrome trace events: a process for each rank, threads for computation and sends.

Names, arguments and threads are those of the predicted trace. Graph nodes lie inside the passes that run them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.plans import Plan

from .step_times import COMPUTE, NODE, SEND, Unit

THREADS = {"step": 1, COMPUTE: 1, NODE: 1, SEND: 2}
RankUnits = list[tuple[int, tuple[Unit, ...]]]
"""Pipeline rank and units of each rank."""


def trace_path(folder: Path, step: int) -> Path:
    """Return the file for the trace of a step of a run."""
    return folder / f"trace-step-{step:06d}.json.gz"


def write_trace(folder: Path, plan: Plan, step: int, ranks: RankUnits) -> Path:
    """Write the trace of a measured step into a run folder, and return the file. Raise UserError if that fails."""
    path = trace_path(folder, step)
    about = {
        "model": plan.model,
        "fingerprint": plan.fingerprint,
        "gpus": str(plan.cluster),
        "layout": str(plan.layout),
        "step": step,
        "step_seconds": max(unit.end for _, units in ranks for unit in units),
        "pipeline_ranks": [pipeline_rank for pipeline_rank, _ in ranks],
    }
    events = [event for rank, (stage, units) in enumerate(ranks) for event in _events(rank, stage, units)]
    text = json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}, separators=(",", ":"))
    try:
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}\nfree some space, or train without --profile") from None
    return path


def _events(rank: int, pipeline_rank: int, units: tuple[Unit, ...]) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank. Times are in microseconds; an end is rounded like a start, so that units touch."""
    names = {0: ("process", f"rank {rank} (pipeline rank {pipeline_rank})"), 1: ("thread", "compute")}
    names |= {2: ("thread", "send")} if any(unit.kind == SEND for unit in units) else {}
    for thread, (what, name) in names.items():
        position = {"sort_index": rank if what == "process" else thread}
        yield {"ph": "M", "pid": rank, "tid": thread, "name": f"{what}_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "tid": thread, "name": f"{what}_sort_index", "args": position}
    for unit in units:
        start, end = round(1e6 * unit.start, 3), round(1e6 * unit.end, 3)
        yield {
            "ph": "X",
            "pid": rank,
            "tid": THREADS[unit.kind],
            "cat": "node" if unit.kind == NODE else "step",
            "name": unit.name,
            "ts": start,
            "dur": round(end - start, 3),
            "args": dict(unit.args),
        }
