"""A model, shown: its lines as a table for people, its figures in columns.

Protocol: `report(outline, precision)` is a thing for rich to print, as wide as it is or, where a width is given, folded
into that; `head` and `foot` are what it says before and after the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .items import Group, Item, Leaf
from .outline import Outline
from .tree import UNICODE, Line, lines
from .words import (
    OPERATIONS,
    Family,
    count,
    family,
    folded,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

HEAD = ("", "\ngives", "\nparameters", "forward\nFLOPs", "saved\nelements", "saved\nbytes")
SPARE = (1, 4)  # columns that a narrow terminal does without, the first of them first
NARROW = 34  # columns for the layers that are too few
GAP = 2
STYLES = {
    Family.TABLE: "yellow",
    Family.ATTENTION: "cyan",
    Family.EXPERTS: "magenta",
    Family.SCAN: "blue",
    Family.DENSE: "green",
}


def table(o: Outline, guides: Sequence[str] = UNICODE, width: int | None = None) -> Table:
    """The lines of a model as columns, the figures to the right; within this width, with fewer columns if need be."""
    from rich.table import Table
    from rich.text import Text

    rows = lines(o, guides)
    shown, room = _fitting(rows, width)
    out = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim")
    for i in shown:
        out.add_column(Text(HEAD[i]), justify="left" if i < 2 else "right", overflow="fold")
    for line in rows:
        shape, *figures = line.cells
        quiet = "dim" if isinstance(line.item, Group) and line.item.layer else ""
        cells = [Text.assemble(*_layer(line, room)), Text(shape, "dim"), *(Text(said, quiet) for said in figures)]
        out.add_row(*(cells[i] for i in shown))
    return out


def _fitting(rows: Sequence[Line], width: int | None) -> tuple[list[int], int]:
    """The columns that fit beside the layers, and the room left for these; 0 for as much as they take."""
    shown = list(range(len(HEAD)))
    if width is None:
        return shown, 0
    cells = [("", *line.cells) for line in rows]
    each = [max(map(len, (*HEAD[i].split("\n"), *(row[i] for row in cells)))) + GAP for i in shown]
    for spare in SPARE:
        if width - sum(each[i] for i in shown) - GAP < NARROW:
            shown.remove(spare)
    return shown, max(NARROW, width - sum(each[i] for i in shown) - GAP)


def _layer(line: Line, room: int) -> list[tuple[str, str]]:
    """What a line says, in pieces with their styles, folded into the room."""
    style = _style(line.item)
    first, *rest = folded(line.title, room - len(line.under) - GAP) if room else [line.title]
    more = [piece for part in rest for piece in (("\n" + line.under + "  ", "dim"), (part, style))]
    return [(line.guide, "dim"), (first, style), *more]


def _style(item: Item | None) -> str:
    if isinstance(item, Leaf):
        return STYLES.get(family(item.node), "")
    return "bold" if item is None or item.layer is None else ""


def head(o: Outline) -> str:
    """What is shown, in a line."""
    sequences = f"{o.batch:,} sequences" if o.batch > 1 else "one sequence"
    source = "" if o.source is None else f", {o.source:,} at its source"
    return f"{o.model.name}: {o.figures.params:,} parameters; for {sequences} of {o.seq:,} tokens{source}"


def foot(o: Outline, precision: str) -> str:
    """What a training step costs, and what the columns mean."""
    f = o.figures
    passes = {"forward": f.forward, "dgrad": f.dgrad, "wgrad": f.wgrad}
    said = ", ".join(f"{name} {count(n, OPERATIONS)}" for name, n in passes.items())
    return (
        f"a training step: {count(sum(passes.values()), OPERATIONS)} FLOPs ({said})\n"
        f"saved: what the backward pass reads, where nothing is recomputed, activations in {precision}"
    )


def report(o: Outline, precision: str, guides: Sequence[str] = UNICODE, width: int | None = None) -> RenderableType:
    """A model in full: its name, its table, and what a training step costs."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(head(o) + "\n"), table(o, guides, width), Text("\n" + foot(o, precision)))
