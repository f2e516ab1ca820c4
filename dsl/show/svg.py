"""Drawing of a model as one self-contained SVG file, in light or dark colours as the reader's screen prefers.

`svg(outline)` returns the text of the file. Boxes are layers, coloured by family, with exact figures as tooltips.
Frames are repeats, lines are values.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from megaloom.dsl.graph import graph

from .arrangement import (
    BOX_PADDING,
    CELL_GAP,
    FRAME_PADDING,
    HEADER_HEIGHT,
    LANE_WIDTH,
    LINE_HEIGHT,
    MARGIN,
    SIGN_RADIUS,
    Cell,
    Edge,
    Picture,
    arrange,
    operator_sign,
)
from .figures import Figures, size
from .formatting import (
    OPERATIONS,
    Family,
    family,
    format_count,
)
from .items import Group, Leaf, inputs_of
from .outline import Outline
from .table import heading
from .tree import title

# Fill and border of the boxes of each family: light, then dark.
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
CORNER_RADIUS = 8.0  # of the bends of lines
LEGEND_WIDTH = 92.0  # per family
SVG_STYLE = f"""
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
DARK_STYLE = """
.page { fill: #0d1117 }
text { fill: #9198a1 }
.head, .name, .as, .plus { fill: #e6edf3 }
.sign { fill: #21262d; stroke: #9198a1 }
.line { stroke: #9198a1 }
.tip, .fork { fill: #9198a1 }
"""


def svg(o: Outline) -> str:
    """Return the drawing of a model."""
    text = _subtitle(o)
    picture = arrange(o, 2 * MARGIN + LINE_HEIGHT * len(text))
    cells = [cell for column in picture.columns for cell in column.walk()]
    legend = list(_legend(cells, picture.height + BOX_PADDING))
    wide = max(picture.width, MARGIN * 2 + LEGEND_WIDTH * len(legend), MARGIN * 2 + 6.2 * max(map(len, text)))
    high = picture.height + LINE_HEIGHT + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}" width="{wide:g}" height="{high:g}">',
        f"<title>{escape(o.model.name)}</title>",
        f"<style>{_style()}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0.5 8 4 0 7.5z"/></marker></defs>',
        f'<rect class="page" width="{wide:g}" height="{high:g}"/>',
        _text("head", o.model.name, MARGIN, 34),
        *(_text("", line, MARGIN, 54 + LINE_HEIGHT * i) for i, line in enumerate(text)),
        *(_frame(cell, cell.item) for cell in cells if isinstance(cell.item, Group) and cell.space_above),
        *(line for cell in cells for line in _column_lines(cell)),
        *(_output_line(column) for column in picture.columns if _output_name(column) in graph(o.model).outputs),
        *(line for edge in picture.edges for line in _edge_line(picture, edge)),
        *(_box(cell, cell.item) for cell in cells if isinstance(cell.item, Leaf)),
        *legend,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _style() -> str:
    light = [f".{f} .box {{ fill: {fill}; stroke: {rim} }}" for f, (fill, rim, _, _) in PALETTE.items()]
    dark = [f".{f} .box {{ fill: {fill}; stroke: {rim} }}" for f, (_, _, fill, rim) in PALETTE.items()]
    return "\n".join([SVG_STYLE, *light, "@media (prefers-color-scheme: dark) {", DARK_STYLE, *dark, "}"])


def _subtitle(o: Outline) -> list[str]:
    """Return the lines of text below the model's name."""
    step = o.figures.forward + o.figures.dgrad + o.figures.wgrad
    flops = f"FLOPs are those of the forward pass; a training step takes {format_count(step, OPERATIONS)}"
    shared = [f"{s.name} {s.value.shape}: {size(s):,} parameters, shared by repeats" for s in o.shared]
    return [heading(o).removeprefix(f"{o.model.name}: "), flops, *shared]


def _text(kind: str, text: str, x: float, y: float, anchor: str = "") -> str:
    placed = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}"{placed}>{escape(text)}</text>'


def _frame(cell: Cell, group: Group) -> str:
    """Return the frame of a group, with its name and the figures of all repetitions in the header."""
    (_, name), (_, costs) = cell.text_lines
    left, right, y = cell.x - cell.left, cell.x + cell.right, cell.y + HEADER_HEIGHT - BOX_PADDING
    return (
        f"<g><title>{escape(_tooltip(title(group), group.figures))}</title>"
        f'<rect class="frame" x="{left:g}" y="{cell.y:g}" width="{right - left:g}" height="{cell.height:g}" rx="12"/>'
        f"{_text('name', name, left + FRAME_PADDING, y)}{_text('', costs, right - FRAME_PADDING, y, 'end')}</g>"
    )


def _box(cell: Cell, leaf: Leaf) -> str:
    """Return the box of a layer with its lines of text."""
    hover = f"<title>{escape(_tooltip(f'{leaf.out}: {title(leaf)} {leaf.node.shape}', leaf.figures))}</title>"
    if text := operator_sign(leaf):
        y = cell.y + SIGN_RADIUS
        circle = f'<circle class="sign" cx="{cell.x:g}" cy="{y:g}" r="{SIGN_RADIUS:g}"/>'
        return f"<g>{hover}{circle}{_text('plus', text, cell.x, y + 5.5)}</g>"
    x, wide = cell.x - cell.left, cell.left + cell.right
    rect = f'<rect class="box" x="{x:g}" y="{cell.y:g}" width="{wide:g}" height="{cell.height:g}" rx="8"/>'
    baselines = (cell.y + BOX_PADDING + LINE_HEIGHT * (i + 0.75) for i in range(len(cell.text_lines)))
    lines = (_text(kind, text, cell.x, y, "middle") for (kind, text), y in zip(cell.text_lines, baselines, strict=True))
    return f'<g class="{family(leaf.node)}">{hover}{rect}{"".join(lines)}</g>'


def _tooltip(what: str, f: Figures) -> str:
    """Return the tooltip with exact figures."""
    return (
        f"{what}\n{f.params:,} parameters\n{f.forward:,} FLOPs forward, {f.dgrad:,} dgrad, {f.wgrad:,} wgrad\n"
        f"{f.saved:,} elements saved, {f.nbytes:,} bytes"
    )


def _column_lines(cell: Cell) -> Iterator[str]:
    """Yield the lines between consecutive children; for a frame, also from its header and to its bottom edge."""
    item = cell.item
    above, start = item.entry if isinstance(item, Group) else "", cell.y + HEADER_HEIGHT if cell.space_above else None
    for inner in cell.children:
        assert inner.item
        if start is not None and above in inputs_of(inner.item):
            yield _line([(cell.x, start), (cell.x, inner.y)], tip=not inner.space_above)
        above, start = inner.item.out, inner.bottom
    if cell.space_above and start is not None:
        yield _line([(cell.x, start), (cell.x, cell.bottom)], tip=False)


def _output_line(column: Cell) -> str:
    return _line([(column.x, column.bottom), (column.x, column.bottom + 0.75 * CELL_GAP)])


def _output_name(column: Cell) -> str:
    last = column.children[-1].item
    return last.last_out if last else ""


def _edge_line(picture: Picture, e: Edge) -> Iterator[str]:
    """Yield the line of an edge from its gap, with a dot if the value also continues to the next cell."""
    source, target, columns = picture.cell(e.source.cell), picture.cell(e.target), picture.columns
    fork = y = source.gap_height(e.source.number)
    points = [(source.x, y)]
    if not (continues := _continues_below(source, e.source.number)):
        points.insert(0, (source.x, source.children[e.source.number - 1].bottom))
    end = target.y - CELL_GAP / 2 if e.enters_from_top else _entry_height(picture, e)
    if e.common_cell:
        first, last = e.child_range
        beside = picture.cell(e.common_cell)
        x = beside.x + max(c.right for c in beside.children[first : last + 1]) + LANE_WIDTH * (e.lane + 1)
        side = target.x + target.right
    else:
        a, b = columns[e.source.cell[0]], columns[e.target[0]]
        x = b.x - b.left - LANE_WIDTH * (e.lane + 1)
        side = target.x - target.left
        if e.source in picture.sources_routed_below and e.target[0] != e.source.cell[0] + 1:
            lane = BOX_PADDING * (1 + picture.sources_routed_below.index(e.source))
            right, y = a.x + a.right + lane, picture.height - lane
            points += [(right, fork), (right, y)]
    points += [(x, y), (x, end)]
    points += [(target.x, end), (target.x, target.y)] if e.enters_from_top else [(side, end)]
    yield _line(points, tip=not (e.enters_from_top and target.space_above))
    if continues:
        yield f'<circle class="fork" cx="{source.x:g}" cy="{fork:g}" r="2.5"/>'


def _continues_below(cell: Cell, number: int) -> bool:
    """Return whether the value that passes a gap is also read by the cell below it."""
    if number in (0, len(cell.children)):
        return number == 0 or cell.space_above > 0
    above, below = cell.children[number - 1].item, cell.children[number].item
    return above is not None and below is not None and above.out in inputs_of(below)


def _entry_height(picture: Picture, e: Edge) -> float:
    """Return the y at which an edge reaches the side of its target. Edges of one target are spread vertically."""
    target = picture.cell(e.target)
    siblings = [other for other in picture.edges if other.target == e.target and not other.enters_from_top]
    step = min(10.0, target.height / (len(siblings) + 1))
    return target.y + target.height / 2 + step * (siblings.index(e) - (len(siblings) - 1) / 2)


def _line(points: list[tuple[float, float]], tip: bool = True) -> str:
    """Return a line through the points, with rounded corners."""
    (x, y), *rest = points
    path = [f"M{x:g} {y:g}"]
    for i, (bx, by) in enumerate(rest):
        if i + 1 == len(rest):
            path.append(f"L{bx:g} {by:g}")
            break
        cx, cy = rest[i + 1]
        space_above, space_below = _toward(bx, by, x, y), _toward(bx, by, cx, cy)
        path.append(f"L{space_above[0]:g} {space_above[1]:g}Q{bx:g} {by:g} {space_below[0]:g} {space_below[1]:g}")
        x, y = bx, by
    marker = ' marker-end="url(#tip)"' if tip else ""
    return f'<path class="line" d="{"".join(path)}"{marker}/>'


def _toward(x: float, y: float, tx: float, ty: float) -> tuple[float, float]:
    """Return the point at CORNER_RADIUS from (x, y) towards (tx, ty), at most halfway."""
    length = abs(tx - x) + abs(ty - y)  # lines are horizontal or vertical
    share = min(CORNER_RADIUS, length / 2) / length if length else 0
    return x + share * (tx - x), y + share * (ty - y)


def _legend(cells: list[Cell], y: float) -> Iterator[str]:
    """Yield the families that occur in the drawing, each with its colour."""
    present = {family(c.item.node) for c in cells if isinstance(c.item, Leaf) and not operator_sign(c.item)}
    for i, name in enumerate(f for f in PALETTE if f in present):
        x = MARGIN + LEGEND_WIDTH * i
        box = f'<rect class="box" x="{x:g}" y="{y:g}" width="16" height="12" rx="3"/>'
        yield f'<g class="{name}">{box}{_text("", name, x + 22, y + 10)}</g>'
