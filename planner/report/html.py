"""A plan as a web page: its timeline, memory, step, place on the cluster and rivals. One file, which loads nothing.

Protocol: `page(plan, model)` is the text of the file; given a search, with what it found beside the plan. The scripts
of `web` draw what is too much for text; what they read is `data`.
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
from megaloom.dsl.show.html import LOOK
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.cost import communication
from megaloom.planner.cost.memory import ALLOCATOR
from megaloom.planner.simulate.memory_timeline import memory_tracks
from megaloom.planner.simulate.price import Priced
from megaloom.planner.simulate.timeline import Timeline

from . import charts
from .chrome_trace import (
    dumps,
    replayed,
    tails,
    write,
)
from .text import (
    holds,
    layout_table,
    prediction_table,
    ranks,
    rejected,
    runners_up,
)

if TYPE_CHECKING:
    from megaloom.planner.search.search import Found

QUANTA = 2**26  # in a step, of the times that the page is given
MANY = 300  # steps of a rank that the whole timeline may not have room for
DEVICES = 32768  # more of them are not drawn
PASSES = {  # what each group of devices exchanges
    "pp": "activations and their gradients, from stage to stage",
    "dp": "gradients, and the weights that its shares have become",
    "cp": "keys and values of attention",
    "tp": "activations, within every layer",
    "ep": "tokens, to and from their experts",
    "etp": "activations, within each expert",
    "edp": "gradients and weights of experts",
}
SCRIPTS = ("common.js", "timeline.js", "memory.js", "map.js", "begin.js")
DRAWN = {  # what the timeline shows, and how that is called
    "forward": "forward",
    "backward": "backward",
    "send": "sends to the next rank",
    "reduction": "gradient reduction",
    "tied": "tied gradients",
    "optimizer": "optimizer",
    "gathering": "weight gathering",
    "wait": "waits",
}


def page(plan: Plan, model: Model, found: Found | None = None) -> str:
    """The text of the file. Raises PlanError if the plan's predictions are not those of this planner."""
    g = graph(model)
    priced = replayed(plan, g)
    name, w = escape(model.name), plan.workload
    style, scripts = _file("page.css"), "".join(f"<script>\n{_file(file)}</script>\n" for file in SCRIPTS)
    said = f"{w} a step, in {w.precision}; {plan.layout}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name} on {escape(str(plan.cluster))}</title>
<style>{LOOK}{style}</style>
</head>
<body>
<main>
<h1>{name} on {escape(str(plan.cluster))}</h1>
<p>{escape(said)}</p>
{charts.tiles(prediction_table(plan))}
{charts.html(layout_table(plan))}
{"".join(_sections(plan, g, priced, found))}</main>
<div id="tip" role="status" hidden></div>
<script type="application/json" id="plan">{_json(data(plan, g, priced))}</script>
{scripts}</body>
</html>
"""


def save(plan: Plan, model: Model, whole: str | None, trace: str | None, found: Found | None = None) -> None:
    """Write the page and the trace of a plan to the files that are given. UserError where that cannot be."""
    if whole:
        write(page(plan, model, found), whole)
    if trace:
        g = graph(model)
        write(dumps(plan, replayed(plan, g), g), trace)


def data(plan: Plan, g: Graph, priced: Priced) -> dict[str, Any]:
    """What the scripts read: seconds and bytes, but for the times of steps, which are in units of `unit` seconds."""
    line, layout = priced.timeline, plan.layout
    unit = priced.seconds / QUANTA
    stages = zip(plan.stages, priced.partition.stages, strict=True)
    after, held = tails(priced), memory_tracks(priced)
    return {
        "step": priced.seconds,
        "pp": layout.pp,
        "unit": unit,
        "took": [round(s / unit) for s in (*line.forward, *reversed(line.backward))],
        "transfer": line.transfer,
        "blocking": layout.vpp == 1,
        "stages": [{"saved": part.saved, "holds": holds(g.nodes[s.start : s.stop], g)} for s, part in stages],
        "tracks": [
            {
                "bare": it.bare,
                "library": it.library,
                "workspace": it.workspace,
                "loss": it.loss,
                "stepping": it.stepping,
            }
            for it in held
        ],
        "allocator": ALLOCATOR,
        "moments": priced.prediction.moments,
        "updates": [[(it.start, it.end) for it in row if it.name == "optimizer"] for row in after],
        "memory": plan.cluster.device.nbytes,
        "device": plan.cluster.device.name,
        "tails": [[(_kind(it.name), it.start, it.end) for it in row] for row in after],
        "drawn": DRAWN,
        "events": packed(line, unit),
        "map": {
            "count": plan.cluster.count,
            "shown": min(plan.cluster.count, DEVICES),
            "perNode": plan.cluster.per_node,
            "axes": [
                {"name": name, "size": group.size, "stride": group.stride} for name, group in _groups(layout).items()
            ],
        },
    }


def packed(line: Timeline, unit: float) -> str:
    """Every rank's steps in three tables of numbers: which leg, which micro-batch, how long it waits before it.

    A micro-batch goes through all stages and back: that many legs, twice. Waits are in units, so that steps that are
    alike look alike, which is what makes them small when they are compressed.
    """
    stages = len(line.forward)
    took = np.array([round(s / unit) for s in (*line.forward, *reversed(line.backward))])
    table = []
    for events in line.events:
        legs = np.array([2 * stages - 1 - s.stage if s.backward else s.stage for s, _, _ in events])
        starts = np.rint(np.array([start for _, start, _ in events]) / unit).astype(np.int64)
        free = np.concatenate([[0], starts[:-1] + took[legs[:-1]]])
        table.append((legs, np.array([s.microbatch for s, _, _ in events]), starts - free))
    numbers = np.array(table).transpose(1, 0, 2).astype("<i4")
    return base64.b64encode(gzip.compress(numbers.tobytes(), mtime=0)).decode()


def _groups(layout: Layout) -> dict[str, communication.ProcessGroup]:
    """The groups of more than one device."""
    axes = ("pp", "dp", "cp", "tp", "ep", "etp", *(("edp",) if layout.ep * layout.etp > 1 else ()))
    groups = {axis: communication.process_group(axis, layout) for axis in axes}
    return {axis: group for axis, group in groups.items() if group.size > 1} or {"pp": groups["pp"]}


def _sections(plan: Plan, g: Graph, priced: Priced, found: Found | None) -> Iterator[str]:
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in plan.reasons)
    where = ", on the pipeline rank that waits least" if plan.layout.pp > 1 else ""
    yield (
        f'<div class="beside"><section><h2>Why</h2>\n<ul>{reasons}</ul></section>\n'
        f"<section><h2>Where the step goes{where}</h2>\n{charts.step(plan)}</section></div>\n"
    )
    yield f"<h2>What each pipeline rank does</h2>\n{_timeline(plan, priced)}\n"
    yield f"<h2>Memory</h2>\n{_memory(plan)}\n"
    yield "<h2>Pipeline ranks: milliseconds of one micro-batch, parameters on one device</h2>\n"
    yield f"{charts.html(ranks(plan, g))}\n"
    yield f"<h2>Where the ranks are</h2>\n{_map(plan)}\n"
    if found and found.others:
        others = (*found.others, *found.variants)
        next_ = runners_up(plan, others[: charts.NAMED - 1])
        yield (
            f"<h2>The next best layouts</h2>\n<p>By number, the best is 1; no other is both quicker and smaller than "
            f"those on the line.</p>\n{charts.scatter((plan, *others))}\n{charts.html(next_, first=2)}\n"
        )
    if found and found.rejected:
        yield f"<h2>The nearest layouts that do not work</h2>\n{charts.html(rejected(found))}\n"


def _timeline(plan: Plan, priced: Priced) -> str:
    there = {"forward", "backward", "wait"} | {_kind(it.name) for row in tails(priced) for it in row}
    there |= {"send"} if plan.layout.vpp == 1 and plan.layout.pp > 1 else set()
    kinds = charts.legend((said, f"var(--{kind})") for kind, said in DRAWN.items() if kind in there)
    lighter = "; the later the chunk of the model, the lighter" if plan.layout.vpp > 1 else ""
    many = max(map(len, priced.timeline.starts)) > MANY
    shares = " Where boxes are too narrow to see, their shares of the time: forward above backward." if many else ""
    return (
        f"<p>A box is one micro-batch through one stage, with its number{lighter}.{shares} Drag to move, double-click "
        "or Ctrl and wheel to zoom, click a rank to see its memory.</p>\n"
        f'<div class="tools">{kinds}<button id="zoom-in" aria-label="zoom in">+</button>'
        '<button id="zoom-out" aria-label="zoom out">−</button><button id="zoom-whole">whole step</button></div>\n'
        '<canvas id="timeline" tabindex="0" role="img" aria-label="timeline of every pipeline rank"></canvas>'
        "<noscript><p>The timeline and the map are drawn by a script.</p></noscript>"
    )


def _kind(name: str) -> str:
    return next(kind for kind, said in DRAWN.items() if said == name)


def _memory(plan: Plan) -> str:
    every = "each pipeline rank" if plan.layout.pp > 1 else "the device"
    return (
        f"<p>What {every} holds over the step, above what is there throughout: what it keeps of its micro-batches, and "
        "what a backward, the loss and the optimizer take for a while.</p>\n"
        '<canvas id="memory" tabindex="0" role="img" aria-label="memory of every pipeline rank over time"></canvas>\n'
        f"<p>At its fullest, by what holds it:</p>\n{charts.ranks(plan)}"
    )


def _map(plan: Plan) -> str:
    """The devices, and what each kind of group spans."""
    cluster, groups = plan.cluster, _groups(plan.layout)
    buttons = "".join(
        f'<button data-axis="{axis}" aria-pressed="{"false" if i else "true"}">{axis}</button>'
        for i, axis in enumerate(groups)
    )
    rows = []
    for axis, group in groups.items():
        nodes, _ = communication.group_nodes(group.size, group.stride, cluster.per_node, cluster.count)
        link = cluster.intra if nodes == 1 else cluster.inter
        cells = (axis, group.size, group.stride, cluster.count // group.size, nodes, link.name, PASSES[axis])
        sides = ("left", "", "", "", "", "left", "left")
        row = zip(cells, sides, strict=True)
        rows.append(f"<tr>{''.join(f'<td class={side!r}>{escape(str(cell))}</td>' for cell, side in row)}</tr>")
    cut = f"; the first {DEVICES:,} of {cluster.count:,} are drawn" if cluster.count > DEVICES else ""
    body = "\n".join(rows)
    return (
        "<p>Devices of one colour are a group along the axis chosen, for pp a pipeline rank; the mouse shows its "
        f"members{cut}.</p>\n"
        f'<div class="tools">{buttons}</div>\n<canvas id="map" role="img" aria-label="devices by node"></canvas>\n'
        '<div class="wide"><table>\n<thead><tr><th class="left">axis</th><th>devices a group</th><th>ranks apart</th>'
        '<th>groups</th><th>nodes a group</th><th class="left">by</th><th class="left">what passes</th></tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _file(name: str) -> str:
    return files(__package__).joinpath("web", name).read_text("utf-8")


def _json(it: object) -> str:
    """JSON that can stand in a script."""
    return json.dumps(it, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
