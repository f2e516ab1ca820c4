"""Charts of a plan's page that need no script: bars, tables, step time against memory. Each function returns HTML."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from html import escape
from math import floor

from rich.table import Table

from megaloom.planner.contract.plans import Plan

from .units import Unit, memory_unit, peak_memory, time_unit

COLOURS = {  # of causes of step time and of holders of memory
    "forward": "var(--forward)",
    "backward": "var(--backward)",
    "recompute": "#7cc08a",
    "tensor-parallel communication": "#e3872d",
    "context-parallel communication": "#f0b429",
    "expert-parallel communication": "#e5654b",
    "sharded-weight communication": "#1b9e93",
    "pipeline communication": "#c9611a",
    "pipeline bubble": "#8c959f",
    "gradient communication": "var(--reduction)",
    "tied-weight communication": "var(--tied)",
    "optimizer": "var(--optimizer)",
    "weights": "var(--backward)",
    "gradients": "var(--reduction)",
    "activations": "var(--forward)",
    "workspace": "#e3872d",
    "logits": "#f0b429",
    "allocator": "#8c959f",
    "runtime": "#c98bb9",
}
SPARE_COLOURS = ("#bf3989", "#57606a", "#7cc08a")  # for parts without a colour above
PLOT_WIDTH, PLOT_HEIGHT, LEFT_MARGIN, BOTTOM_MARGIN = 560.0, 300.0, 64.0, 44.0  # pixels
MAX_LABELS = 24  # of the bars of pipeline ranks
SMALL_SHARE = 0.4  # bars that fill less of a device are scaled to the fullest rank, not to the device
NUMBERED_PLANS = 10  # the other plans of a scatter plot are small dots
DOT_RADIUS, SMALL_DOT_RADIUS = 9.0, 3.5
NUMBER_WIDTH, NUMBER_HEIGHT = 18.0, 12.0  # pixels of a dot's number


def colours(parts: Iterable[str]) -> dict[str, str]:
    """Return the colour of each part."""
    new = [part for part in parts if part not in COLOURS]
    return {**COLOURS, **{part: SPARE_COLOURS[i % len(SPARE_COLOURS)] for i, part in enumerate(new)}}


def table_html(table: Table, first: int | None = None) -> str:
    """Return a rich table as HTML; its rows are numbered from `first`, if given."""
    sides = [' class="left"' if column.justify == "left" else "" for column in table.columns]
    count = itertools.count(first) if first is not None else None
    head = "<th>#</th>" if count else ""
    head += "".join(f"<th{side}>{escape(str(c.header))}</th>" for c, side in zip(table.columns, sides, strict=True))
    rows = zip(*(column.cells for column in table.columns), strict=True)
    body = "\n".join(
        f"<tr>{f'<td>{next(count)}</td>' if count else ''}"
        f"{''.join(f'<td{side}>{escape(str(cell))}</td>' for cell, side in zip(row, sides, strict=True))}</tr>"
        for row in rows
    )
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def tiles_html(table: Table) -> str:
    """Return the only row of a table as tiles with large figures."""
    pairs = ((str(column.header), str(next(iter(column.cells)))) for column in table.columns)
    each = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in pairs)
    return f'<div class="tiles">{each}</div>'


def _colour_chip(colour: str) -> str:
    """Return a spot of colour."""
    return f'<span class="chip" style="background: {colour}"></span>'


def legend_html(parts: Iterable[tuple[str, str]]) -> str:
    """Return names, each after its colour."""
    return f'<div class="legend">{"".join(f"<span>{_colour_chip(c)}{escape(name)}</span>" for name, c in parts)}</div>'


def breakdown_html(plan: Plan) -> str:
    """Return the step time by cause as a bar, and as a table that ends with the sum."""
    parts, time = plan.predicted.breakdown, time_unit(plan)
    colour, whole = colours(parts), sum(parts.values())
    bar = "".join(_share(cause, s / whole, colour[cause], f"{time.of(s)} {time.name}") for cause, s in parts.items())
    figures = zip(parts, time.parts(parts.values()), Unit("%", whole / 100, 1).parts(parts.values()), strict=True)
    rows = "\n".join(
        f'<tr><td class="left">{_colour_chip(colour[cause])}{escape(cause)}</td><td>{figure}</td><td>{share}%</td></tr>'
        for cause, figure, share in figures
    )
    return (
        f'<div class="bar">{bar}</div>\n<table>\n<thead><tr><th></th><th>{time.name}</th><th>share</th></tr></thead>\n'
        f'<tbody>\n{rows}\n<tr class="sum"><td class="left">total</td><td>{time.of(whole)}</td><td>100.0%</td></tr>\n'
        "</tbody>\n</table>"
    )


def memory_bars(plan: Plan) -> str:
    """Return the peak memory of each pipeline rank as a bar, scaled to the memory of a device."""
    nbytes, size = plan.predicted.nbytes, memory_unit(plan)
    holders = list(dict.fromkeys(holder for rank in nbytes for holder in rank))
    colour, most = colours(holders), peak_memory(plan)
    device = plan.cluster.device.nbytes
    whole = max(device, most) if most > SMALL_SHARE * device else most
    every = -(-len(nbytes) // MAX_LABELS)
    kind = "ranks" if every == 1 else "ranks many"
    bars = "\n".join(_rank(i, rank, whole, colour, size, i % every == 0) for i, rank in enumerate(nbytes))
    return f'{legend_html((holder, colour[holder]) for holder in holders)}\n<div class="{kind}">\n{bars}\n</div>'


def _rank(rank: int, holders: dict[str, int], whole: int, colour: dict[str, str], size: Unit, named: bool) -> str:
    parts = "".join(
        _share(holder, n / whole, colour[holder], f"rank {rank}, {size.of(n)} {size.name}")
        for holder, n in holders.items()
    )
    name, filled = (f"rank {rank}", size.of(sum(holders.values()))) if named else ("", "")
    return f"<i>{name}</i><div>{parts}</div><b>{filled}</b>"


def _share(name: str, share: float, colour: str, amount: str) -> str:
    return f'<span style="width: {100 * share:.3f}%; background: {colour}" title="{escape(name)}: {amount}"></span>'


def pareto_front(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans that no other plan beats in both step time and memory, fastest first."""
    front: list[Plan] = []
    for plan in sorted(plans, key=lambda p: (p.predicted.step_seconds, peak_memory(p))):
        if not front or peak_memory(plan) < peak_memory(front[-1]):
            front.append(plan)
    return front


def scatter_plot(plans: Sequence[Plan]) -> str:
    """Return a plot of step time against memory, with a line through the Pareto front. The best plan comes first."""
    size, time = memory_unit(plans[0]), time_unit(plans[0])
    memory, seconds = (
        axis_values([peak_memory(p) / size.size for p in plans]),
        axis_values([p.predicted.step_seconds / time.size for p in plans]),
    )

    def at(plan: Plan) -> tuple[float, float]:
        x = (peak_memory(plan) / size.size - memory[0]) / (memory[-1] - memory[0])
        y = (plan.predicted.step_seconds / time.size - seconds[0]) / (seconds[-1] - seconds[0])
        return LEFT_MARGIN + x * (PLOT_WIDTH - LEFT_MARGIN - 20), (PLOT_HEIGHT - BOTTOM_MARGIN) - y * (
            PLOT_HEIGHT - BOTTOM_MARGIN - 16
        )

    points = [at(plan) for plan in plans]
    line = _stairs([at(plan) for plan in pareto_front(plans)])
    dots = [_dot(i, plan, points) for i, plan in enumerate(plans)]
    return "\n".join(
        [
            f'<svg viewBox="0 0 {PLOT_WIDTH:g} {PLOT_HEIGHT:g}" width="{PLOT_WIDTH:g}" height="{PLOT_HEIGHT:g}"'
            ' role="img" '
            'aria-label="step time against memory">',
            *grid_lines(memory, seconds),
            _title(f"peak memory, {size.name}", f"translate({(LEFT_MARGIN + PLOT_WIDTH) / 2:g} {PLOT_HEIGHT - 8:g})"),
            _title(f"step time, {time.name}", f"translate(13 {(PLOT_HEIGHT - BOTTOM_MARGIN) / 2:g}) rotate(-90)"),
            f'<path class="front" d="{line}"/>',
            *reversed(dots),  # the best on top
            "</svg>",
        ]
    )


def _title(title: str, transform: str) -> str:
    return f'<text transform="{transform}" text-anchor="middle">{title}</text>'


def _dot(i: int, plan: Plan, points: Sequence[tuple[float, float]]) -> str:
    """Return the dot of a plan, with its layout as a tooltip, and its number unless a better plan's number is there."""
    (x, y), size, time = points[i], memory_unit(plan), time_unit(plan)
    free = all(abs(x - a) > NUMBER_WIDTH or abs(y - b) > NUMBER_HEIGHT for a, b in points[:i]) and i < NUMBERED_PLANS
    seconds, nbytes = time.of(plan.predicted.step_seconds), size.of(peak_memory(plan))
    tooltip = f"{plan.layout}\n{seconds} {time.name} per step, {nbytes} {size.name}"
    number = f'<text x="{x:.1f}" y="{y + 4:.1f}">{i + 1}</text>' if free else ""
    kind, r = "plan" if i else "plan best", DOT_RADIUS if i < NUMBERED_PLANS else SMALL_DOT_RADIUS
    return (
        f'<g><title>{escape(tooltip)}</title><circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{r:g}"/>{number}</g>'
    )


def _stairs(points: Sequence[tuple[float, float]]) -> str:
    """Return a staircase through these points: between two of them, the slower one is the best."""
    (x, y), *rest = points
    return f"M{x:.1f} {y:.1f}" + "".join(f"V{b:.1f}H{a:.1f}" for a, b in rest)


def grid_lines(across: Sequence[float], up: Sequence[float]) -> Iterable[str]:
    """Yield the lines of a plot at these values of its axes, with the values beside them."""
    foot = PLOT_HEIGHT - BOTTOM_MARGIN
    for i, value in enumerate(across):
        x = LEFT_MARGIN + i / (len(across) - 1) * (PLOT_WIDTH - LEFT_MARGIN - 20)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{foot:g}"/>'
        yield f'<text x="{x:.1f}" y="{foot + 16:g}" text-anchor="middle">{value:g}</text>'
    for i, value in enumerate(up):
        y = foot - i / (len(up) - 1) * (foot - 16)
        yield f'<line class="grid" x1="{LEFT_MARGIN:g}" x2="{PLOT_WIDTH - 20:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT_MARGIN - 8:g}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'


def axis_values(values: Sequence[float]) -> list[float]:
    """Return round numbers at even distances that enclose these values."""
    low, high = min(values), max(values)
    rough = max((high - low) / 4, abs(high) / 200, 1e-9)
    power = 10.0**-20
    while 10 * power <= rough:
        power *= 10
    gap = next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= rough * (1 - 1e-9))
    first = 0 if 0 <= low / gap <= 0.25 else floor(low / gap - 0.25)
    last = first + 1
    while last * gap < high + gap / 4:
        last += 1
    return [float(f"{i * gap:.6g}") for i in range(first, last + 1)]
