"""Where an outline is drawn: each column from top to bottom around a line in its middle, which values flow along.

Protocol: `arrange(outline)` is a `Picture`: a `Cell` for each column, which has those of its items inside, and so on;
and the `Edge`s, values on their way past the cells between. Lengths are in pixels, y grows downwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil

from attrs import define, evolve, field, frozen

from megaloom.dsl.combine import Residual

from .items import (
    Group,
    Item,
    Leaf,
    reads,
)
from .labels import WIDTH, placard, sign
from .outline import Outline

GAP, PAD, HEADER, RADIUS = 26.0, 18.0, 30.0, 11.0
LINE, RIM, NARROW = 16.0, 9.0, 190.0  # a line of text, the rim above and below, the width of the narrowest box
STEP = 12.0  # by which boxes are wider than others, so that lines beside them lie one below the other
LANE, BETWEEN, MARGIN = 16.0, 44.0, 28.0

Path = tuple[int, ...]  # the column, the place in it, the place inside that ...


@define
class Cell:
    """An item as it is drawn, or a column (which has none): its top's middle, and how far it reaches from there.

    before and after: what is above and below the cells inside.
    """

    path: Path
    item: Item | None
    left: float
    right: float
    height: float
    says: tuple[tuple[str, str], ...] = ()  # lines of text, each after what it is
    inside: tuple[Cell, ...] = ()
    before: float = 0
    after: float = 0
    x: float = 0
    y: float = 0

    def place(self, x: float, y: float) -> None:
        """Put the middle of its top here, and what is inside below."""
        self.x, self.y = x, y
        y += self.before
        for cell in self.inside:
            cell.place(x, y)
            y += cell.height + GAP

    @property
    def bottom(self) -> float:
        """Where it ends."""
        return self.y + self.height

    def all(self) -> Iterator[Cell]:
        """This cell, and all that are inside."""
        yield self
        for cell in self.inside:
            yield from cell.all()

    def gap(self, number: int) -> float:
        """The height at which a value passes above the cell of this number inside, or below the last."""
        return self.inside[number].y - GAP / 2 if number < len(self.inside) else self.inside[-1].bottom + GAP / 2


@frozen
class Slot:
    """The gap above the cell of this number inside another (or below its last)."""

    cell: Path
    number: int


@frozen
class Edge:
    """A value on its way from a gap to a cell that is not the next one down.

    top: whether it arrives from above, as a value that goes into a group or a column does. lane: which of the ways
    beside the cells it takes, counted from them.
    """

    source: Slot
    target: Path
    top: bool
    lane: int = 0

    @property
    def around(self) -> Path:
        """The innermost cell that has both; () for different columns."""
        n = 0
        for a, b in zip(self.source.cell, self.target[:-1], strict=False):
            if a != b:
                break
            n += 1
        return self.target[:n]

    @property
    def span(self) -> tuple[int, int]:
        """The numbers, there, of the cell below the gap and of the target."""
        depth = len(self.around)
        return (*self.source.cell, self.source.number)[depth], self.target[depth]


@frozen(eq=False)
class Picture:
    """The columns of a model with their places, the edges, and the size of it all."""

    columns: tuple[Cell, ...]
    edges: tuple[Edge, ...]
    width: float
    height: float

    @property
    def below(self) -> tuple[Slot, ...]:
        """The sources of those edges that pass below columns in between."""
        apart = (e.source for e in self.edges if not e.around and e.target[0] != e.source.cell[0] + 1)
        return tuple(dict.fromkeys(apart))

    def cell(self, path: Path) -> Cell:
        """The cell of this path."""
        found = self.columns[path[0]]
        for i in path[1:]:
            found = found.inside[i]
        return found


@define
class _Flow:
    """The state of following values down the columns: where each passed last, and who reads it from there."""

    passes: dict[str, Slot] = field(factory=dict)
    wanted: list[tuple[str, Slot | None, Path, bool]] = field(factory=list)

    def read(self, items: Sequence[Item], entry: str, path: Path) -> None:
        above = entry
        for i, item in enumerate(items):
            if above:
                self.passes[above] = Slot(path, i)
            here, top = (*path, i), isinstance(item, Group) or (i == 0 and len(path) == 1)
            self.wanted += [(name, self.passes.get(name), here, top) for name in reads(item) if name != above]
            if isinstance(item, Group):
                self.read(item.items, item.entry, here)
            above = item.out
        self.passes[above] = Slot(path, len(items))

    def edges(self) -> list[Edge]:
        """What was read, also from columns further on."""
        return [Edge(slot or self.passes[name], path, top) for name, slot, path, top in self.wanted]


def arrange(o: Outline, top: float = MARGIN) -> Picture:
    """The picture of a model, which begins this far down."""
    flow = _Flow()
    for i, column in enumerate(o.columns):
        flow.read(column, "", (i,))
    edges = _lanes(flow.edges())
    lanes = {path: 1 + max(e.lane for e in edges if e.around == path) for path in {e.around for e in edges}}
    columns = tuple(_column(column, (i,), lanes) for i, column in enumerate(o.columns))
    picture = Picture(columns, tuple(edges), 0, 0)
    x = MARGIN
    for i, cell in enumerate(columns):
        arriving = {e.lane for e in edges if not e.around and e.target[0] == i}
        x += LANE * len(arriving) + cell.left
        begins = [e.source for e in edges if e.top and e.target == (i, 0) and e.source.cell[0] < i]
        cell.place(x, max([top, *(picture.cell(s.cell).gap(s.number) + GAP / 2 for s in begins)]))
        x += cell.right + BETWEEN
    high = max(c.bottom for c in columns) + MARGIN + RIM * len(picture.below)
    return evolve(picture, width=x - BETWEEN + MARGIN, height=high)


def _lanes(edges: Sequence[Edge]) -> list[Edge]:
    """The edges, such that no two are in each other's way; those of one source go together, short ones inside."""
    taken: dict[tuple[Path, int | None, int], list[tuple[int, int, Slot]]] = {}
    out = []
    for e in sorted(edges, key=lambda e: e.span[1] - e.span[0]):
        around = e.around
        column = None if around else e.target[0]
        first, last = e.span if around else (0, 0)
        lane = 0
        while any(
            a <= last and first <= b and slot != e.source for a, b, slot in taken.get((around, column, lane), ())
        ):
            lane += 1
        taken.setdefault((around, column, lane), []).append((first, last, e.source))
        out.append(evolve(e, lane=lane))
    return out


def _column(items: Sequence[Item], path: Path, lanes: Mapping[Path, int]) -> Cell:
    return _around(Cell(path, None, 0, 0, 0), [_cell(item, (*path, i), lanes) for i, item in enumerate(items)], lanes)


def _cell(item: Item, path: Path, lanes: Mapping[Path, int]) -> Cell:
    """An item, and what is inside, with their sizes."""
    says = placard(item)
    wide = [WIDTH[what] * len(text) for what, text in says]
    if isinstance(item, Leaf):
        if sign(item):
            return Cell(path, item, RADIUS, RADIUS, 2 * RADIUS)
        half = ceil(max(NARROW, *wide) / 2 / STEP) * STEP + PAD
        return Cell(path, item, half, half, LINE * len(says) + 2 * RIM, says)
    inner = [_cell(part, (*path, i), lanes) for i, part in enumerate(item.items)]
    if isinstance(item.layer, Residual):
        return _around(Cell(path, item, 0, 0, 0), inner, lanes)
    frame = _around(Cell(path, item, 0, 0, 0, says, before=HEADER + GAP, after=GAP), inner, lanes)
    more = max(0.0, sum(wide) + PAD - frame.left - frame.right) / 2
    return evolve(frame, left=frame.left + PAD + more, right=frame.right + PAD + more)


def _around(cell: Cell, inside: Sequence[Cell], lanes: Mapping[Path, int]) -> Cell:
    """A cell around others."""
    height = cell.before + sum(c.height for c in inside) + GAP * (len(inside) - 1) + cell.after
    right = max(c.right for c in inside) + LANE * lanes.get(cell.path, 0)
    return evolve(cell, left=max(c.left for c in inside), right=right, height=height, inside=tuple(inside))
