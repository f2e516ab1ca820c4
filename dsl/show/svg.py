"""A model drawn as SVG: a picture that needs nothing but itself, light or dark as the reader's screen is.

Protocol: `svg(outline)` is the text of a file. Boxes are layers, coloured by family, with exact figures where the mouse
rests; frames are repeats; lines are values.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from megaloom.dsl.graph import graph

from .arrangement import (
    GAP,
    HEADER,
    LANE,
    LINE,
    MARGIN,
    PAD,
    RADIUS,
    RIM,
    Cell,
    Edge,
    Picture,
    arrange,
)
from .figures import Figures, size
from .items import Group, Leaf, reads
from .labels import sign
from .outline import Outline
from .table import head
from .tree import title
from .words import (
    OPERATIONS,
    Family,
    count,
    family,
)

# Of each family the fill and the rim of its boxes: light, then dark.
PALETTE = {
    Family.INPUT: ("#ffffff", "#8c959f", "#21262d", "#8b949e"),
    Family.TABLE: ("#fff8c5", "#bf8700", "#3b2e0a", "#d29922"),
    Family.ATTENTION: ("#ddf4ff", "#218bff", "#0c2d4d", "#58a6ff"),
    Family.EXPERTS: ("#fbefff", "#a475f9", "#2f1a4d", "#bc8cff"),
    Family.SCAN: ("#d8f6f3", "#1b9e93", "#0a3833", "#39c5bb"),
    Family.DENSE: ("#dafbe1", "#2da44e", "#0f3320", "#3fb950"),
    Family.NORM: ("#f3f4f6", "#afb8c1", "#24292f", "#6e7681"),
    Family.OTHER: ("#ffffff", "#afb8c1", "#1c2128", "#6e7681"),
}
SANS = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
TURN = 8.0  # the radius of a line's corners
LEGEND = 92.0  # the width of a family in the legend
STYLE = f"""
.page {{ fill: #ffffff }}
text {{ font: 11px {SANS}; fill: #57606a }}
.head {{ font-size: 18px; font-weight: 600; fill: #1f2328 }}
.name {{ font-size: 13px; font-weight: 600; fill: #1f2328 }}
.as {{ font-family: {MONO}; fill: #1f2328 }}
.shape {{ font-family: {MONO} }}
.box {{ stroke-width: 1.25 }}
.frame {{ fill: #818b98; fill-opacity: 0.07; stroke: #818b98; stroke-opacity: 0.6 }}
.sign {{ fill: #ffffff; stroke: #57606a; stroke-width: 1.25 }}
.plus {{ font-size: 16px; fill: #1f2328; text-anchor: middle }}
.line {{ fill: none; stroke: #57606a; stroke-width: 1.25 }}
.tip, .fork {{ fill: #57606a }}
"""
DARK = """
.page { fill: #0d1117 }
text { fill: #9198a1 }
.head, .name, .as, .plus { fill: #e6edf3 }
.sign { fill: #21262d; stroke: #9198a1 }
.line { stroke: #9198a1 }
.tip, .fork { fill: #9198a1 }
"""


def svg(o: Outline) -> str:
    """The drawing of a model."""
    said = _said(o)
    picture = arrange(o, 2 * MARGIN + LINE * len(said))
    cells = [cell for column in picture.columns for cell in column.all()]
    legend = list(_legend(cells, picture.height + RIM))
    wide = max(picture.width, MARGIN * 2 + LEGEND * len(legend), MARGIN * 2 + 6.2 * max(map(len, said)))
    high = picture.height + LINE + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}" width="{wide:g}" height="{high:g}">',
        f"<title>{escape(o.model.name)}</title>",
        f"<style>{_style()}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0.5 8 4 0 7.5z"/></marker></defs>',
        f'<rect class="page" width="{wide:g}" height="{high:g}"/>',
        _text("head", o.model.name, MARGIN, 34),
        *(_text("", line, MARGIN, 54 + LINE * i) for i, line in enumerate(said)),
        *(_frame(cell, cell.item) for cell in cells if isinstance(cell.item, Group) and cell.before),
        *(line for cell in cells for line in _down(cell)),
        *(_out(column) for column in picture.columns if _ends(column) in graph(o.model).outputs),
        *(line for edge in picture.edges for line in _past(picture, edge)),
        *(_box(cell, cell.item) for cell in cells if isinstance(cell.item, Leaf)),
        *legend,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _style() -> str:
    light = [f".{f} .box {{ fill: {fill}; stroke: {rim} }}" for f, (fill, rim, _, _) in PALETTE.items()]
    dark = [f".{f} .box {{ fill: {fill}; stroke: {rim} }}" for f, (_, _, fill, rim) in PALETTE.items()]
    return "\n".join([STYLE, *light, "@media (prefers-color-scheme: dark) {", DARK, *dark, "}"])


def _said(o: Outline) -> list[str]:
    """What is said below the name."""
    step = o.figures.forward + o.figures.dgrad + o.figures.wgrad
    flops = f"FLOPs are those of the forward pass; a training step takes {count(step, OPERATIONS)}"
    shared = [f"{s.name} {s.value.shape}: {size(s):,} parameters, shared by repeats" for s in o.shared]
    return [head(o).removeprefix(f"{o.model.name}: "), flops, *shared]


def _text(kind: str, said: str, x: float, y: float, anchor: str = "") -> str:
    placed = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}"{placed}>{escape(said)}</text>'


def _frame(cell: Cell, group: Group) -> str:
    """A group: its name and what it costs all its times, in the head of a frame."""
    (_, name), (_, costs) = cell.says
    left, right, y = cell.x - cell.left, cell.x + cell.right, cell.y + HEADER - RIM
    return (
        f"<g><title>{escape(_exactly(title(group), group.figures))}</title>"
        f'<rect class="frame" x="{left:g}" y="{cell.y:g}" width="{right - left:g}" height="{cell.height:g}" rx="12"/>'
        f"{_text('name', name, left + PAD, y)}{_text('', costs, right - PAD, y, 'end')}</g>"
    )


def _box(cell: Cell, leaf: Leaf) -> str:
    """A layer: what is written on it, line by line."""
    hover = f"<title>{escape(_exactly(f'{leaf.out}: {title(leaf)} {leaf.node.shape}', leaf.figures))}</title>"
    if said := sign(leaf):
        y = cell.y + RADIUS
        circle = f'<circle class="sign" cx="{cell.x:g}" cy="{y:g}" r="{RADIUS:g}"/>'
        return f"<g>{hover}{circle}{_text('plus', said, cell.x, y + 5.5)}</g>"
    x, wide = cell.x - cell.left, cell.left + cell.right
    rect = f'<rect class="box" x="{x:g}" y="{cell.y:g}" width="{wide:g}" height="{cell.height:g}" rx="8"/>'
    baselines = (cell.y + RIM + LINE * (i + 0.75) for i in range(len(cell.says)))
    lines = (_text(kind, said, cell.x, y, "middle") for (kind, said), y in zip(cell.says, baselines, strict=True))
    return f'<g class="{family(leaf.node)}">{hover}{rect}{"".join(lines)}</g>'


def _exactly(what: str, f: Figures) -> str:
    """What the mouse shows."""
    return (
        f"{what}\n{f.params:,} parameters\n{f.forward:,} FLOPs forward, {f.dgrad:,} dgrad, {f.wgrad:,} wgrad\n"
        f"{f.saved:,} elements saved, {f.nbytes:,} bytes"
    )


def _down(cell: Cell) -> Iterator[str]:
    """The lines from each thing inside to the next, and of a frame from its head and to its foot."""
    item = cell.item
    above, start = item.entry if isinstance(item, Group) else "", cell.y + HEADER if cell.before else None
    for inner in cell.inside:
        assert inner.item
        if start is not None and above in reads(inner.item):
            yield _line([(cell.x, start), (cell.x, inner.y)], tip=not inner.before)
        above, start = inner.item.out, inner.bottom
    if cell.before and start is not None:
        yield _line([(cell.x, start), (cell.x, cell.bottom)], tip=False)


def _out(column: Cell) -> str:
    return _line([(column.x, column.bottom), (column.x, column.bottom + 0.75 * GAP)])


def _ends(column: Cell) -> str:
    last = column.inside[-1].item
    return last.end if last else ""


def _past(picture: Picture, e: Edge) -> Iterator[str]:
    """The line of an edge, from where its value passes; with a fork there, if it also goes on."""
    source, target, columns = picture.cell(e.source.cell), picture.cell(e.target), picture.columns
    fork = y = source.gap(e.source.number)
    points = [(source.x, y)]
    if not (on := _goes_on(source, e.source.number)):
        points.insert(0, (source.x, source.inside[e.source.number - 1].bottom))
    end = target.y - GAP / 2 if e.top else _entry(picture, e)
    if e.around:
        first, last = e.span
        beside = picture.cell(e.around)
        x = beside.x + max(c.right for c in beside.inside[first : last + 1]) + LANE * (e.lane + 1)
        side = target.x + target.right
    else:
        a, b = columns[e.source.cell[0]], columns[e.target[0]]
        x = b.x - b.left - LANE * (e.lane + 1)
        side = target.x - target.left
        if e.source in picture.below and e.target[0] != e.source.cell[0] + 1:
            lane = RIM * (1 + picture.below.index(e.source))
            right, y = a.x + a.right + lane, picture.height - lane
            points += [(right, fork), (right, y)]
    points += [(x, y), (x, end)]
    points += [(target.x, end), (target.x, target.y)] if e.top else [(side, end)]
    yield _line(points, tip=not (e.top and target.before))
    if on:
        yield f'<circle class="fork" cx="{source.x:g}" cy="{fork:g}" r="2.5"/>'


def _goes_on(cell: Cell, number: int) -> bool:
    """Whether what passes a gap is also read below it."""
    if number in (0, len(cell.inside)):
        return number == 0 or cell.before > 0
    above, below = cell.inside[number - 1].item, cell.inside[number].item
    return above is not None and below is not None and above.out in reads(below)


def _entry(picture: Picture, e: Edge) -> float:
    """The height at which an edge arrives: those of one target one below the other."""
    target = picture.cell(e.target)
    those = [other for other in picture.edges if other.target == e.target and not other.top]
    step = min(10.0, target.height / (len(those) + 1))
    return target.y + target.height / 2 + step * (those.index(e) - (len(those) - 1) / 2)


def _line(points: list[tuple[float, float]], tip: bool = True) -> str:
    """A line through these points, its corners round."""
    (x, y), *rest = points
    path = [f"M{x:g} {y:g}"]
    for i, (bx, by) in enumerate(rest):
        if i + 1 == len(rest):
            path.append(f"L{bx:g} {by:g}")
            break
        cx, cy = rest[i + 1]
        before, after = _toward(bx, by, x, y), _toward(bx, by, cx, cy)
        path.append(f"L{before[0]:g} {before[1]:g}Q{bx:g} {by:g} {after[0]:g} {after[1]:g}")
        x, y = bx, by
    marker = ' marker-end="url(#tip)"' if tip else ""
    return f'<path class="line" d="{"".join(path)}"{marker}/>'


def _toward(x: float, y: float, tx: float, ty: float) -> tuple[float, float]:
    """A point a turn away from one in the direction of another, at most half the way."""
    length = abs(tx - x) + abs(ty - y)  # lines go along the axes
    share = min(TURN, length / 2) / length if length else 0
    return x + share * (tx - x), y + share * (ty - y)


def _legend(cells: list[Cell], y: float) -> Iterator[str]:
    """The families that occur, each with its colour."""
    there = {family(c.item.node) for c in cells if isinstance(c.item, Leaf) and not sign(c.item)}
    for i, name in enumerate(f for f in PALETTE if f in there):
        x = MARGIN + LEGEND * i
        box = f'<rect class="box" x="{x:g}" y="{y:g}" width="16" height="12" rx="3"/>'
        yield f'<g class="{name}">{box}{_text("", name, x + 22, y + 10)}</g>'
