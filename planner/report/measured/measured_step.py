"""A measured step beside the predicted one: the trace that `megaloom train --profile` writes, and its sums.

`read_trace` reads the trace, `with_prediction` adds the events of the prediction, `seconds_of_trace` and
`seconds_of_plan` add up the time of each kind of work on each pipeline rank, and of each graph node.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import parse_json, read_whole
from megaloom.dsl.graph import Graph
from megaloom.planner.contract.layouts import Rows
from megaloom.planner.contract.plans import Plan
from megaloom.planner.cost.columns import BACKWARD_COLUMNS, FORWARD_COLUMNS, STEP_COLUMNS
from megaloom.planner.cost.cost_table import cross_entropy_costs
from megaloom.planner.report.chrome_trace import COMPUTE_THREAD, SEND_THREAD, end_of_step_slices, trace_events
from megaloom.planner.simulate.price import Priced

PREDICTED_PID = 1_000_000
"""Process number of the first predicted pipeline rank in a trace of both."""
WAITING = "waiting and sends"
KINDS = (
    "forward",
    "backward",
    "load of experts",
    "gradient reduction",
    "tied gradients",
    "optimizer",
    "weight gather",
)
"""Kinds of work, by their names in traces. The rest of a step is `WAITING`."""


@frozen
class StepSeconds:
    """Seconds of one step by kind of work on each pipeline rank, and by graph node over all micro-batches."""

    step: float
    kinds: tuple[Mapping[str, float], ...]  # by pipeline rank
    nodes: Mapping[str, float]


@frozen
class MeasuredTrace:
    """A trace that the runtime has written."""

    path: Path
    about: Mapping[str, Any]
    events: tuple[Mapping[str, Any], ...]

    @property
    def step(self) -> int:
        """Return the number of the step."""
        return int(self.about["step"])


def read_trace(path: Path) -> MeasuredTrace:
    """Return the trace of a measured step. Raise UserError for a file that is none."""
    advice = "`megaloom train MODEL --profile 10` writes one into the run's folder"
    try:
        data = read_whole(path)
        raw = parse_json(gzip.decompress(data) if path.suffix == ".gz" else data)
        about, events = raw["otherData"], raw["traceEvents"]
        ranks, step = about["pipeline_ranks"], about["step"]
    except OSError as error:
        reason = error.strerror or "not a gzip file"
        raise UserError(f"cannot read a trace from {path}: {reason}\n{advice}") from None
    except (ValueError, EOFError, KeyError, TypeError):
        raise UserError(f"{path} is not the trace of a measured step\n{advice}") from None
    if not isinstance(step, int) or not ranks or not isinstance(events, list):
        raise UserError(f"{path} is not the trace of a measured step\n{advice}")
    return MeasuredTrace(path, about, tuple(e for e in events if e.get("pid", 0) < PREDICTED_PID))


def check_same_model(trace: MeasuredTrace, plan: Plan, where: str) -> None:
    """Raise UserError unless the trace is one of this plan; `where` names the plan."""
    if (trace.about.get("fingerprint"), trace.about.get("layout")) != (plan.fingerprint, str(plan.layout)):
        raise UserError(
            f"{trace.path} is a step of {trace.about.get('model')} under {trace.about.get('layout')}, which is not the "
            f"plan in {where}\ngive the run's own folder, or its plan.json and trace"
        )


def with_prediction(trace: MeasuredTrace, plan: Plan, priced: Priced, graph: Graph) -> str:
    """Return the trace with the predicted step below the measured one, as JSON."""
    predicted = (_moved(event) for event in trace_events(plan, priced, graph))
    nodes = _predicted_nodes(plan, priced, graph)
    whole = {
        "displayTimeUnit": "ms",
        "otherData": {**trace.about, "predicted_step_seconds": plan.predicted.step_seconds},
        "traceEvents": [*trace.events, *predicted, *nodes],
    }
    return json.dumps(whole, separators=(",", ":"), allow_nan=False)


def _moved(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event of the predicted trace with a process number and name of its own."""
    args = dict(event["args"])
    if event["name"] == "process_name":
        args["name"] = f"predicted {args['name']}"
    if event["name"] == "process_sort_index":
        args["sort_index"] += PREDICTED_PID
    return {**event, "pid": event["pid"] + PREDICTED_PID, "args": args}


def _predicted_nodes(plan: Plan, priced: Priced, graph: Graph) -> Iterator[dict[str, Any]]:
    """Yield the graph nodes inside the first micro-batch's passes; the others would make the file large."""
    rows = node_costs(priced, graph)
    for rank, events in enumerate(priced.timeline.events):
        for step, start, end in events:
            if step.microbatch:
                continue
            stage = plan.stages[step.stage]
            columns = BACKWARD_COLUMNS if step.backward else FORWARD_COLUMNS
            order = range(stage.start, stage.stop)
            for node in reversed(order) if step.backward else order:
                until = min(end, start + float(rows[node, columns].sum()))
                at, duration = round(1e6 * start, 3), round(1e6 * until, 3) - round(1e6 * start, 3)
                args = {"microbatch": 0, "stage": step.stage, "pass": "backward" if step.backward else "forward"}
                yield {
                    "ph": "X",
                    "pid": PREDICTED_PID + rank,
                    "tid": COMPUTE_THREAD,
                    "cat": "node",
                    "name": graph.nodes[node].name,
                    "ts": at,
                    "dur": round(duration, 3),
                    "args": args,
                }
                start = until


def node_costs(priced: Priced, graph: Graph) -> Rows:
    """Return the costs of each node, [nodes, columns], with those of a cross-entropy at the loss that computes it.

    The cost model counts them with the layer of the logits.
    """
    problem = priced.partition.problem
    structure, rows = problem.table.structure, problem.table.by_node.copy()
    for i, kind in enumerate(structure.kinds[k] for k in structure.kind_of_node):
        readers = [j for j, n in enumerate(graph.nodes) if n.is_loss and graph.nodes[i].name in n.inputs]
        if kind.has_loss and readers:
            moved = cross_entropy_costs(problem.job, kind, problem.layout, problem.job.workload.seq)
            rows[i] -= moved
            rows[readers] += moved / len(readers)
    return rows


def seconds_of_trace(trace: MeasuredTrace) -> StepSeconds:
    """Return the seconds in a trace, each the mean over the ranks of a pipeline rank."""
    pipeline_ranks, step = trace.about["pipeline_ranks"], float(trace.about["step_seconds"])
    sharing = [pipeline_ranks.count(rank) for rank in range(max(pipeline_ranks) + 1)]
    kinds: list[dict[str, float]] = [defaultdict(float) for _ in sharing]
    nodes: dict[str, float] = defaultdict(float)
    for event in trace.events:
        if event["ph"] == "X" and event["tid"] != SEND_THREAD:
            rank = pipeline_ranks[event["pid"]]
            seconds = event["dur"] / 1e6 / sharing[rank]
            if event["cat"] == "node":
                nodes[event["name"]] += seconds
            elif event["name"] in KINDS:
                kinds[rank][event["name"]] += seconds
    return StepSeconds(step, tuple(_with_waiting(each, step) for each in kinds), nodes)


def seconds_of_plan(plan: Plan, priced: Priced, graph: Graph) -> StepSeconds:
    """Return the seconds of the predicted step."""
    step, microbatches = priced.seconds, priced.timeline.microbatches
    kinds = []
    for events, after in zip(priced.timeline.events, end_of_step_slices(priced), strict=True):
        own: dict[str, float] = defaultdict(float)
        for one, start, end in events:
            own["backward" if one.backward else "forward"] += end - start
        for it in after:
            own[it.name] += it.end - it.start
        own["load of experts"] += plan.predicted.breakdown.get("load of experts", 0.0)
        kinds.append(_with_waiting(own, step))
    rows = microbatches * node_costs(priced, graph)[:, STEP_COLUMNS].sum(axis=1)
    return StepSeconds(step, tuple(kinds), {n.name: float(s) for n, s in zip(graph.nodes, rows, strict=True)})


def _with_waiting(kinds: Mapping[str, float], step: float) -> dict[str, float]:
    """Return the seconds of all kinds of work, in their order, with the rest of the step as waiting."""
    return {**{kind: kinds.get(kind, 0.0) for kind in KINDS}, WAITING: max(0.0, step - sum(kinds.values()))}
