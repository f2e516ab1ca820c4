"""A plan as a web page: step time, timeline, memory, devices, and other layouts. One file, which loads nothing else.

`plan_page(plan, model)` returns the text of the file; given a search, the page also shows the other layouts. The
scripts in `web/` draw the timeline, memory over time and the device map from the JSON that `page_data` returns.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from megaloom.dsl.graph import Graph, Model, graph
from megaloom.dsl.show.html import document
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.cost import communication
from megaloom.planner.cost.memory import ALLOCATOR
from megaloom.planner.pipeline.timeline import Timeline
from megaloom.planner.simulate.memory_timeline import memory_tracks
from megaloom.planner.simulate.price import Priced

from . import charts
from .chrome_trace import end_of_step_slices, replay, trace_json, write_file
from .interval_sentences import interval_text, overflow_text
from .tables import (
    layout_table,
    next_best_table,
    prediction_table,
    rank_table,
    rejected_table,
    stage_contents,
)
from .text import RANKS_TITLE, REJECTED_TITLE, breakdown_title

if TYPE_CHECKING:
    from megaloom.planner.search.search import Found

TIME_STEPS = 2**26  # in which the page counts the time of one step
NARROW_EVENTS = 300  # per rank: with more, the boxes of the whole timeline may be too narrow to see
MAX_DEVICES = 32768  # that are drawn
EXCHANGED = {  # along each axis
    "pp": "activations and their gradients, between stages",
    "dp": "gradients; with a distributed optimizer also updated weights",
    "cp": "keys and values of attention",
    "tp": "activations, within every layer",
    "ep": "tokens, to experts and back",
    "etp": "activations, within each expert",
    "edp": "gradients and weights of experts",
}
SCRIPTS = ("common.js", "timeline.js", "memory.js", "map.js", "begin.js")
EVENT_NAMES = {  # of the timeline, by the key that the scripts use
    "forward": "forward",
    "backward": "backward",
    "send": "send to the next rank",
    "reduction": "gradient reduction",
    "tied": "tied gradients",
    "optimizer": "optimizer",
    "gathering": "weight gather",
    "wait": "waiting (bubble)",
}


def plan_page(plan: Plan, model: Model, result: Found | None = None) -> str:
    """Return the text of the file. Raises PlanError if the plan was made with another cost model."""
    g = graph(model)
    priced = replay(plan, g)
    title, w = f"{model.name} on {plan.cluster}", plan.workload
    scripts = "".join(f"<script>\n{_file(file)}</script>\n" for file in SCRIPTS)
    subtitle = f"{w} per step, in {w.precision}; {plan.layout}"
    body = f"""<main>
<h1>{escape(title)}</h1>
<p>{escape(subtitle)}</p>
{charts.tiles_html(prediction_table(plan))}
{"".join(f"<p>{escape(sentence)}</p>" for sentence in (interval_text(plan), overflow_text(plan)) if sentence)}
{charts.table_html(layout_table(plan))}
{"".join(_sections(plan, g, priced, result))}</main>
<div id="tip" role="status" hidden></div>
<script type="application/json" id="plan">{_json(page_data(plan, g, priced))}</script>
{scripts}"""
    return document(title, page_style(), body)


def page_style() -> str:
    """Return the style of pages with charts, beside that of all documents."""
    return _file("page.css")


def save_page_and_trace(
    plan: Plan, model: Model, page: str | None, trace: str | None, result: Found | None = None
) -> None:
    """Write the page and the trace of a plan, each if its path is given. Raises UserError if that fails."""
    if page:
        write_file(plan_page(plan, model, result), page)
    if trace:
        g = graph(model)
        write_file(trace_json(plan, replay(plan, g), g), trace)


def page_data(plan: Plan, g: Graph, priced: Priced) -> dict[str, Any]:
    """Return the JSON for the scripts, in seconds and bytes; times of events are in units of `unit` seconds."""
    timeline, layout = priced.timeline, plan.layout
    unit = priced.seconds / TIME_STEPS
    stages = zip(plan.stages, priced.partition.stages, strict=True)
    after, memory = end_of_step_slices(priced), memory_tracks(priced)
    return {
        "step": priced.seconds,
        "pp": layout.pp,
        "unit": unit,
        "durations": [round(s / unit) for s in (*timeline.forward, *reversed(timeline.backward))],
        "transfer": timeline.transfer,
        "blocking": layout.vpp == 1,
        "stages": [{"saved": part.saved, "holds": stage_contents(g.nodes[s.start : s.stop], g)} for s, part in stages],
        "tracks": [
            {
                "fixed": it.bare,
                "library": it.library,
                "workspace": it.workspace,
                "loss": it.loss,
                "optimizer": it.stepping,
            }
            for it in memory
        ],
        "allocator": ALLOCATOR,
        "moments": priced.prediction.moments,
        "updates": [[(it.start, it.end) for it in row if it.name == "optimizer"] for row in after],
        "memory": plan.cluster.device.nbytes,
        "device": plan.cluster.device.name,
        "endOfStep": [[(_kind(it.name), it.start, it.end) for it in row] for row in after],
        "drawn": EVENT_NAMES,
        "events": packed_events(timeline, unit),
        "map": {
            "count": plan.cluster.count,
            "shown": min(plan.cluster.count, MAX_DEVICES),
            "perNode": plan.cluster.per_node,
            "axes": [
                {"name": name, "size": group.size, "stride": group.stride} for name, group in _groups(layout).items()
            ],
        },
    }


def packed_events(timeline: Timeline, unit: float) -> str:
    """Return the events of all ranks as three compressed tables: pass, micro-batch, and waiting time before the event.

    A micro-batch has two passes per stage: passes 0 to stages - 1 are forward passes, the others backward passes.
    Waiting times are whole units, so that equal events have equal numbers and compress well.
    """
    stages = len(timeline.forward)
    durations = np.array([round(s / unit) for s in (*timeline.forward, *reversed(timeline.backward))])
    table = []
    for events in timeline.events:
        passes = np.array([2 * stages - 1 - s.stage if s.backward else s.stage for s, _, _ in events])
        starts = np.rint(np.array([start for _, start, _ in events]) / unit).astype(np.int64)
        free = np.concatenate([[0], starts[:-1] + durations[passes[:-1]]])
        table.append((passes, np.array([s.microbatch for s, _, _ in events]), starts - free))
    numbers = np.array(table).transpose(1, 0, 2).astype("<i4")
    return base64.b64encode(gzip.compress(numbers.tobytes(), mtime=0)).decode()


def _groups(layout: Layout) -> dict[str, communication.ProcessGroup]:
    """Return the process groups of more than one device by axis; the pp group if there are none."""
    axes = ("pp", "dp", "cp", "tp", "ep", "etp", *(("edp",) if layout.ep * layout.etp > 1 else ()))
    groups = {axis: communication.process_group(axis, layout) for axis in axes}
    return {axis: group for axis, group in groups.items() if group.size > 1} or {"pp": groups["pp"]}


def _sections(plan: Plan, g: Graph, priced: Priced, result: Found | None) -> Iterator[str]:
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in plan.reasons)
    yield (
        f'<div class="columns"><section><h2>Why</h2>\n<ul>{reasons}</ul></section>\n'
        f"<section><h2>{breakdown_title(plan)}</h2>\n{charts.breakdown_html(plan)}</section></div>\n"
    )
    yield f"<h2>Timeline of each pipeline rank</h2>\n{_timeline(plan, priced)}\n"
    yield f"<h2>Memory</h2>\n{_memory(plan)}\n"
    yield f"<h2>{RANKS_TITLE}</h2>\n"
    yield f"{charts.table_html(rank_table(plan, g))}\n"
    yield f"<h2>Devices and process groups</h2>\n{_map(plan)}\n"
    if result and result.others:
        others = (*result.others, *result.variants)
        next_best = next_best_table(plan, others[: charts.NUMBERED_PLANS - 1])
        yield (
            "<h2>Next best layouts</h2>\n<p>Number 1 is the best. The line is the Pareto front: no other layout is "
            "both faster and smaller.</p>\n"
            f"{charts.scatter_plot((plan, *others))}\n{charts.table_html(next_best, first=2)}\n"
        )
    if result and result.rejected:
        yield f"<h2>{REJECTED_TITLE}</h2>\n{charts.table_html(rejected_table(result))}\n"


def _timeline(plan: Plan, priced: Priced) -> str:
    shown = {"forward", "backward", "wait"} | {_kind(it.name) for row in end_of_step_slices(priced) for it in row}
    shown |= {"send"} if plan.layout.vpp == 1 and plan.layout.pp > 1 else set()
    kinds = charts.legend_html((name, f"var(--{kind})") for kind, name in EVENT_NAMES.items() if kind in shown)
    lighter = "; later model chunks are lighter" if plan.layout.vpp > 1 else ""
    many = max(map(len, priced.timeline.starts)) > NARROW_EVENTS
    shares = (
        " Where boxes are too narrow, the shares of forward (above) and backward (below) are shown." if many else ""
    )
    return (
        f"<p>A box is one micro-batch in one stage, with its number{lighter}.{shares} Drag to move, double-click or "
        "use Ctrl and the wheel to zoom, click a rank to see its memory.</p>\n"
        f'<div class="tools">{kinds}<button id="zoom-in" aria-label="zoom in">+</button>'
        '<button id="zoom-out" aria-label="zoom out">−</button><button id="zoom-whole">whole step</button></div>\n'
        '<canvas id="timeline" tabindex="0" role="img" aria-label="timeline of every pipeline rank"></canvas>'
        "<noscript><p>The timeline and the map need JavaScript.</p></noscript>"
    )


def _kind(name: str) -> str:
    return next(kind for kind, text in EVENT_NAMES.items() if text == name)


def _memory(plan: Plan) -> str:
    every = "each pipeline rank" if plan.layout.pp > 1 else "the device"
    return (
        f"<p>Memory of {every} over the step: below, what stays for the whole step; above, saved activations and the "
        "transient memory of backward passes, the loss and the optimizer.</p>\n"
        '<canvas id="memory" tabindex="0" role="img" aria-label="memory of every pipeline rank over time"></canvas>\n'
        f"<p>Peak memory by holder:</p>\n{charts.memory_bars(plan)}"
    )


def _map(plan: Plan) -> str:
    """Return the map of devices, and a table of the process groups along each axis."""
    cluster, groups = plan.cluster, _groups(plan.layout)
    buttons = "".join(
        f'<button data-axis="{axis}" aria-pressed="{"false" if i else "true"}">{axis}</button>'
        for i, axis in enumerate(groups)
    )
    rows = []
    for axis, group in groups.items():
        nodes, _ = communication.group_nodes(group.size, group.stride, cluster.per_node, cluster.count)
        link = cluster.intra if nodes == 1 else cluster.inter
        cells = (axis, group.size, group.stride, cluster.count // group.size, nodes, link.name, EXCHANGED[axis])
        sides = ("left", "", "", "", "", "left", "left")
        row = zip(cells, sides, strict=True)
        rows.append(f"<tr>{''.join(f'<td class={side!r}>{escape(str(cell))}</td>' for cell, side in row)}</tr>")
    cut = f"; the first {MAX_DEVICES:,} of {cluster.count:,} are drawn" if cluster.count > MAX_DEVICES else ""
    body = "\n".join(rows)
    return (
        "<p>Devices of one colour form a group along the chosen axis; for pp, one pipeline rank. Point at a device "
        f"to see its group{cut}.</p>\n"
        f'<div class="tools">{buttons}</div>\n<canvas id="map" role="img" aria-label="devices by node"></canvas>\n'
        '<div class="wide"><table>\n<thead><tr><th class="left">axis</th><th>devices per group</th><th>rank stride</th>'
        '<th>groups</th><th>nodes per group</th><th class="left">link</th><th class="left">exchanges</th></tr>'
        "</thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _file(name: str) -> str:
    return files(__package__).joinpath("web", name).read_text("utf-8")


def _json(it: object) -> str:
    """Return JSON that is safe inside of a script element."""
    return json.dumps(it, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
