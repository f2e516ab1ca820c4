"""Positions of an outline's boxes and lines in a drawing, and the text in each box.

`arrange(outline)` returns a `Picture`: one `Cell` per column with its items as child cells, and the `Edge`s of values
that skip cells. Each column runs from top to bottom around a vertical center line. Lengths are in pixels; y grows
downwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil

from attrs import define, evolve, field, frozen

from megaloom.dsl.combine import Residual
from megaloom.dsl.value import Pointwise

from .figures import Figures
from .formatting import (
    OPERATIONS,
    format_bytes,
    format_count,
    wrap_text,
)
from .items import (
    Group,
    Item,
    Leaf,
    inputs_of,
)
from .outline import Outline
from .tree import title

CELL_GAP = 26.0  # between cells of a column
FRAME_PADDING, HEADER_HEIGHT = 18.0, 30.0
SIGN_RADIUS = 11.0  # of the circle around "+", "×" or "÷"
LINE_HEIGHT, BOX_PADDING, MIN_BOX_WIDTH = 16.0, 9.0, 190.0
WIDTH_STEP = 12.0  # box widths are multiples of this, so that the lines to the right of boxes align
LANE_WIDTH, COLUMN_GAP, MARGIN = 16.0, 44.0, 28.0

# Width of a character for each kind of text, in pixels: 0.61 em of a monospaced font, an upper limit for other fonts.
CHARACTER_WIDTH: Mapping[str, float] = {"name": 8.0, "as": 6.8, "shape": 6.8, "figures": 6.2}
MAX_CHARACTERS = 44  # per line
SIGNS = {"add": "+", "mul": "×", "div": "÷"}

CellPath = tuple[int, ...]  # index of the column, then the child index at each depth


@define
class Cell:
    """The rectangle of an item, or of a column (`item` is None).

    `x`, `y` are the center of its top edge; `left` and `right` are its extents from there. `space_above` and
    `space_below` are the heights above the first and below the last child cell.
    """

    path: CellPath
    item: Item | None
    left: float
    right: float
    height: float
    text_lines: tuple[tuple[str, str], ...] = ()  # (kind, text)
    children: tuple[Cell, ...] = ()
    space_above: float = 0
    space_below: float = 0
    x: float = 0
    y: float = 0

    def move_to(self, x: float, y: float) -> None:
        """Move the center of the top edge to (x, y), and the child cells with it."""
        self.x, self.y = x, y
        y += self.space_above
        for cell in self.children:
            cell.move_to(x, y)
            y += cell.height + CELL_GAP

    @property
    def bottom(self) -> float:
        """Return the y of the bottom edge."""
        return self.y + self.height

    def walk(self) -> Iterator[Cell]:
        """Yield this cell and its descendants."""
        yield self
        for cell in self.children:
            yield from cell.walk()

    def gap_height(self, number: int) -> float:
        """Return the y of the gap above child cell `number`, or of the gap below the last one."""
        if number < len(self.children):
            return self.children[number].y - CELL_GAP / 2
        return self.children[-1].bottom + CELL_GAP / 2


@frozen
class GapPosition:
    """The gap above child `number` of a cell, or below its last child."""

    cell: CellPath
    number: int


@frozen
class Edge:
    """A line from a gap to a cell that is not the next one down.

    enters_from_top: the line enters the target at its top, as for groups and first cells of columns, else at its side.
    lane: the number of the vertical lane that the line uses, counted from the cells outwards.
    """

    source: GapPosition
    target: CellPath
    enters_from_top: bool
    lane: int = 0

    @property
    def common_cell(self) -> CellPath:
        """Return the innermost cell that contains source and target; () for different columns."""
        n = 0
        for a, b in zip(self.source.cell, self.target[:-1], strict=False):
            if a != b:
                break
            n += 1
        return self.target[:n]

    @property
    def child_range(self) -> tuple[int, int]:
        """Return two child indices in the common cell: of the cell below the gap, and of the target."""
        depth = len(self.common_cell)
        return (*self.source.cell, self.source.number)[depth], self.target[depth]


@frozen(eq=False)
class Picture:
    """The columns and edges of a model with their positions, and the size of the drawing."""

    columns: tuple[Cell, ...]
    edges: tuple[Edge, ...]
    width: float
    height: float

    @property
    def sources_routed_below(self) -> tuple[GapPosition, ...]:
        """Return the sources of edges that pass below the columns between source and target."""
        sources = (e.source for e in self.edges if not e.common_cell and e.target[0] != e.source.cell[0] + 1)
        return tuple(dict.fromkeys(sources))

    def cell(self, path: CellPath) -> Cell:
        """Return the cell at a path."""
        cell = self.columns[path[0]]
        for i in path[1:]:
            cell = cell.children[i]
        return cell


@define
class _Flow:
    """The state of a traversal of the columns: the last gap that each value passed, and the reads of distant values."""

    passes: dict[str, GapPosition] = field(factory=dict)
    pending_reads: list[tuple[str, GapPosition | None, CellPath, bool]] = field(factory=list)

    def read(self, items: Sequence[Item], entry: str, path: CellPath) -> None:
        above = entry
        for i, item in enumerate(items):
            if above:
                self.passes[above] = GapPosition(path, i)
            cell, top = (*path, i), isinstance(item, Group) or (i == 0 and len(path) == 1)
            self.pending_reads += [
                (name, self.passes.get(name), cell, top) for name in inputs_of(item) if name != above
            ]
            if isinstance(item, Group):
                self.read(item.items, item.entry, cell)
            above = item.out
        self.passes[above] = GapPosition(path, len(items))

    def edges(self) -> list[Edge]:
        """Return one edge for each read, including reads of columns to the right."""
        return [Edge(gap or self.passes[name], path, top) for name, gap, path, top in self.pending_reads]


def arrange(o: Outline, top: float = MARGIN) -> Picture:
    """Return the picture of a model; `top` is the least y of its columns."""
    flow = _Flow()
    for i, column in enumerate(o.columns):
        flow.read(column, "", (i,))
    edges = _lanes(flow.edges())
    lanes = {path: 1 + max(e.lane for e in edges if e.common_cell == path) for path in {e.common_cell for e in edges}}
    columns = tuple(_column(column, (i,), lanes) for i, column in enumerate(o.columns))
    picture = Picture(columns, tuple(edges), 0, 0)
    x = MARGIN
    for i, cell in enumerate(columns):
        arriving = {e.lane for e in edges if not e.common_cell and e.target[0] == i}
        x += LANE_WIDTH * len(arriving) + cell.left
        begins = [e.source for e in edges if e.enters_from_top and e.target == (i, 0) and e.source.cell[0] < i]
        cell.move_to(x, max([top, *(picture.cell(s.cell).gap_height(s.number) + CELL_GAP / 2 for s in begins)]))
        x += cell.right + COLUMN_GAP
    height = max(c.bottom for c in columns) + MARGIN + BOX_PADDING * len(picture.sources_routed_below)
    return evolve(picture, width=x - COLUMN_GAP + MARGIN, height=height)


def _lanes(edges: Sequence[Edge]) -> list[Edge]:
    """Return the edges with lanes assigned, such that edges of different sources do not overlap.

    Greedy, shortest edges first: they get the lanes closest to the cells.
    """
    occupied: dict[tuple[CellPath, int | None, int], list[tuple[int, int, GapPosition]]] = {}
    out = []
    for e in sorted(edges, key=lambda e: e.child_range[1] - e.child_range[0]):
        common = e.common_cell
        column = None if common else e.target[0]
        first, last = e.child_range if common else (0, 0)
        lane = 0
        while any(
            a <= last and first <= b and gap != e.source for a, b, gap in occupied.get((common, column, lane), ())
        ):
            lane += 1
        occupied.setdefault((common, column, lane), []).append((first, last, e.source))
        out.append(evolve(e, lane=lane))
    return out


def _column(items: Sequence[Item], path: CellPath, lanes: Mapping[CellPath, int]) -> Cell:
    return _around(Cell(path, None, 0, 0, 0), [_cell(item, (*path, i), lanes) for i, item in enumerate(items)], lanes)


def _cell(item: Item, path: CellPath, lanes: Mapping[CellPath, int]) -> Cell:
    """Return the cell of an item with its size and its child cells."""
    lines = text_lines(item)
    widths = [CHARACTER_WIDTH[kind] * len(text) for kind, text in lines]
    if isinstance(item, Leaf):
        if operator_sign(item):
            return Cell(path, item, SIGN_RADIUS, SIGN_RADIUS, 2 * SIGN_RADIUS)
        half = ceil(max(MIN_BOX_WIDTH, *widths) / 2 / WIDTH_STEP) * WIDTH_STEP + FRAME_PADDING
        return Cell(path, item, half, half, LINE_HEIGHT * len(lines) + 2 * BOX_PADDING, lines)
    inner = [_cell(part, (*path, i), lanes) for i, part in enumerate(item.items)]
    if isinstance(item.layer, Residual):
        return _around(Cell(path, item, 0, 0, 0), inner, lanes)
    frame = _around(
        Cell(path, item, 0, 0, 0, lines, space_above=HEADER_HEIGHT + CELL_GAP, space_below=CELL_GAP), inner, lanes
    )
    widening = max(0.0, sum(widths) + FRAME_PADDING - frame.left - frame.right) / 2
    return evolve(frame, left=frame.left + FRAME_PADDING + widening, right=frame.right + FRAME_PADDING + widening)


def _around(cell: Cell, children: Sequence[Cell], lanes: Mapping[CellPath, int]) -> Cell:
    """Return a cell with these children and the size that they need."""
    height = cell.space_above + sum(c.height for c in children) + CELL_GAP * (len(children) - 1) + cell.space_below
    right = max(c.right for c in children) + LANE_WIDTH * lanes.get(cell.path, 0)
    return evolve(cell, left=max(c.left for c in children), right=right, height=height, children=tuple(children))


def operator_sign(item: Item) -> str:
    """Return the sign of a sum, a product or a quotient of values, which are drawn as circles; "" for other items."""
    op = item.node.op if isinstance(item, Leaf) else None
    return SIGNS.get(op.fn, "") if isinstance(op, Pointwise) else ""


def text_lines(item: Item) -> tuple[tuple[str, str], ...]:
    """Return the lines of text in an item's box, as (kind, text): name, arguments, shape, figures."""
    if isinstance(item, Leaf):
        return () if operator_sign(item) else tuple(_leaf(item))
    if isinstance(item.layer, Residual):
        return ()
    name = f"{item.times}×" if item.times > 1 else title(item)
    return ("name", name), ("figures", figures_text(item.figures))


def _leaf(item: Leaf) -> Iterator[tuple[str, str]]:
    name, _, arguments = title(item).partition("(")
    yield "name", name
    if text := arguments.removesuffix(")"):
        for line in wrap_text(text, MAX_CHARACTERS):
            yield "as", line
    yield "shape", str(item.node.shape)
    if text := figures_text(item.figures, tied=bool(item.tied)):
        yield "figures", text


def figures_text(f: Figures, tied: bool = False) -> str:
    """Return parameters, FLOPs and saved bytes as one line of text; "" if all are 0."""
    texts = [f"{format_count(f.params)} parameters"] * bool(f.params) + ["tied weights"] * tied
    texts += [f"{format_count(f.forward, OPERATIONS)} FLOPs"] * bool(f.forward)
    texts += [f"{format_bytes(f.nbytes)} saved"] * bool(f.nbytes)
    return " · ".join(texts)
