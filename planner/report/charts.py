"""What a plan's page draws without a script: bars, tables, time against memory. Each function gives a piece of HTML."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from html import escape

from rich.table import Table

from megaloom.planner.contract.plans import Plan

from .text import (
    Unit,
    clock,
    fullest,
    unit,
)

COLOURS = {  # of a step's parts, and of what holds memory
    "forward": "var(--forward)",
    "backward": "var(--backward)",
    "recompute": "#7cc08a",
    "tensor-parallel communication": "#e3872d",
    "context-parallel communication": "#f0b429",
    "expert-parallel communication": "#e5654b",
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
SPARE = ("#1b9e93", "#bf3989", "#57606a", "#7cc08a")  # for parts that have no colour yet
WIDE, HIGH, LEFT, FOOT = 560.0, 300.0, 64.0, 44.0  # of the drawing of time against memory
LABELS = 24  # pipeline ranks, beyond which not every bar is named
SMALL = 0.4  # what fills less of a device is drawn against the fullest, not against the device
NAMED = 10  # plans that have a number; the others are small dots
DOT, SMALL_DOT = 9.0, 3.5
NUMBER = 18.0, 12.0  # what a number takes


def colours(parts: Iterable[str]) -> dict[str, str]:
    """A colour for each part."""
    new = [part for part in parts if part not in COLOURS]
    return {**COLOURS, **{part: SPARE[i % len(SPARE)] for i, part in enumerate(new)}}


def html(table: Table, first: int | None = None) -> str:
    """A table that rich would print, as one of a page; its rows counted from a number, if one is given."""
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


def tiles(table: Table) -> str:
    """The one row of a table, as large figures."""
    pairs = ((str(column.header), str(next(iter(column.cells)))) for column in table.columns)
    each = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in pairs)
    return f'<div class="tiles">{each}</div>'


def chip(colour: str) -> str:
    """A spot of colour."""
    return f'<span class="chip" style="background: {colour}"></span>'


def legend(parts: Iterable[tuple[str, str]]) -> str:
    """Names, each behind its colour."""
    return f'<div class="legend">{"".join(f"<span>{chip(c)}{escape(name)}</span>" for name, c in parts)}</div>'


def step(plan: Plan) -> str:
    """The step's parts: a bar, and a table that ends with their sum."""
    parts, time = plan.predicted.breakdown, clock(plan)
    colour, whole = colours(parts), sum(parts.values())
    bar = "".join(_share(cause, s / whole, colour[cause], f"{time.of(s)} {time.name}") for cause, s in parts.items())
    figures = zip(parts, time.parts(parts.values()), Unit("%", whole / 100, 1).parts(parts.values()), strict=True)
    rows = "\n".join(
        f'<tr><td class="left">{chip(colour[cause])}{escape(cause)}</td><td>{figure}</td><td>{share}%</td></tr>'
        for cause, figure, share in figures
    )
    return (
        f'<div class="bar">{bar}</div>\n<table>\n<thead><tr><th></th><th>{time.name}</th><th>share</th></tr></thead>\n'
        f'<tbody>\n{rows}\n<tr class="sum"><td class="left">a step</td><td>{time.of(whole)}</td><td>100.0%</td></tr>\n'
        "</tbody>\n</table>"
    )


def ranks(plan: Plan) -> str:
    """What each pipeline rank holds at its fullest: a bar for each, all against the memory of a device."""
    nbytes, size = plan.predicted.nbytes, unit(plan)
    holders = list(dict.fromkeys(holder for rank in nbytes for holder in rank))
    colour, most = colours(holders), fullest(plan)
    device = plan.cluster.device.nbytes
    whole = max(device, most) if most > SMALL * device else most
    every = -(-len(nbytes) // LABELS)
    kind = "ranks" if every == 1 else "ranks many"
    bars = "\n".join(_rank(i, held, whole, colour, size, i % every == 0) for i, held in enumerate(nbytes))
    return f'{legend((holder, colour[holder]) for holder in holders)}\n<div class="{kind}">\n{bars}\n</div>'


def _rank(rank: int, held: dict[str, int], whole: int, colour: dict[str, str], size: Unit, named: bool) -> str:
    parts = "".join(
        _share(holder, n / whole, colour[holder], f"rank {rank}, {size.of(n)} {size.name}")
        for holder, n in held.items()
    )
    name, filled = (f"rank {rank}", size.of(sum(held.values()))) if named else ("", "")
    return f"<i>{name}</i><div>{parts}</div><b>{filled}</b>"


def _share(name: str, share: float, colour: str, said: str) -> str:
    return f'<span style="width: {100 * share:.3f}%; background: {colour}" title="{escape(name)}: {said}"></span>'


def front(plans: Sequence[Plan]) -> list[Plan]:
    """Those that no other is both quicker and smaller than, the quickest first."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda p: (p.predicted.step_seconds, fullest(p))):
        if not kept or fullest(plan) < fullest(kept[-1]):
            kept.append(plan)
    return kept


def scatter(plans: Sequence[Plan]) -> str:
    """Time against memory of these plans, the best first; a line joins those that no other is better than in both."""
    size, time = unit(plans[0]), clock(plans[0])
    memory, seconds = (
        _axis([fullest(p) / size.size for p in plans]),
        _axis([p.predicted.step_seconds / time.size for p in plans]),
    )

    def at(plan: Plan) -> tuple[float, float]:
        x = (fullest(plan) / size.size - memory[0]) / (memory[-1] - memory[0])
        y = (plan.predicted.step_seconds / time.size - seconds[0]) / (seconds[-1] - seconds[0])
        return LEFT + x * (WIDE - LEFT - 20), (HIGH - FOOT) - y * (HIGH - FOOT - 16)

    places = [at(plan) for plan in plans]
    line = _stairs([at(plan) for plan in front(plans)])
    dots = [_dot(i, plan, places) for i, plan in enumerate(plans)]
    return "\n".join(
        [
            f'<svg viewBox="0 0 {WIDE:g} {HIGH:g}" width="{WIDE:g}" height="{HIGH:g}" role="img" '
            'aria-label="time against memory">',
            *_grid(memory, seconds),
            _name(f"{size.name} on the fullest rank", f"translate({(LEFT + WIDE) / 2:g} {HIGH - 8:g})"),
            _name(f"{time.name} a step", f"translate(13 {(HIGH - FOOT) / 2:g}) rotate(-90)"),
            f'<path class="front" d="{line}"/>',
            *reversed(dots),  # the best above all
            "</svg>",
        ]
    )


def _name(said: str, where: str) -> str:
    return f'<text transform="{where}" text-anchor="middle">{said}</text>'


def _dot(i: int, plan: Plan, places: Sequence[tuple[float, float]]) -> str:
    """A plan: its number, unless that of a better one is there, and where the mouse rests what it is."""
    (x, y), size, time = places[i], unit(plan), clock(plan)
    free = all(abs(x - a) > NUMBER[0] or abs(y - b) > NUMBER[1] for a, b in places[:i]) and i < NAMED
    seconds, nbytes = time.of(plan.predicted.step_seconds), size.of(fullest(plan))
    said = f"{plan.layout}\n{seconds} {time.name} a step, {nbytes} {size.name}"
    number = f'<text x="{x:.1f}" y="{y + 4:.1f}">{i + 1}</text>' if free else ""
    kind, r = "plan" if i else "plan best", DOT if i < NAMED else SMALL_DOT
    return f'<g><title>{escape(said)}</title><circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{r:g}"/>{number}</g>'


def _stairs(points: Sequence[tuple[float, float]]) -> str:
    """A line through these points that goes along the axes: what is between two of them is as slow as the slower."""
    (x, y), *rest = points
    return f"M{x:.1f} {y:.1f}" + "".join(f"V{b:.1f}H{a:.1f}" for a, b in rest)


def _grid(memory: Sequence[float], seconds: Sequence[float]) -> Iterable[str]:
    foot = HIGH - FOOT
    for i, value in enumerate(memory):
        x = LEFT + i / (len(memory) - 1) * (WIDE - LEFT - 20)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{foot:g}"/>'
        yield f'<text x="{x:.1f}" y="{foot + 16:g}" text-anchor="middle">{value:g}</text>'
    for i, value in enumerate(seconds):
        y = foot - i / (len(seconds) - 1) * (foot - 16)
        yield f'<line class="grid" x1="{LEFT:g}" x2="{WIDE - 20:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8:g}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'


def _axis(values: Sequence[float]) -> list[float]:
    """Round numbers, evenly apart, around these values."""
    low, high = min(values), max(values)
    rough = max((high - low) / 4, abs(high) / 200, 1e-9)
    power = 10.0**-20
    while 10 * power <= rough:
        power *= 10
    gap = next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= rough * (1 - 1e-9))
    first = int(low / gap - 0.25) if low / gap > 0.25 else 0
    last = first + 1
    while last * gap < high + gap / 4:
        last += 1
    return [float(f"{i * gap:.6g}") for i in range(first, last + 1)]
