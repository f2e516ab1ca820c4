"""A model as a table: the tree of its layers on the left, its figures in columns on the right.

`report(outline, precision)` returns a rich renderable with a heading, the table and a footer. With a width, it drops
columns and wraps the names of layers to fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megaloom.dsl.facts.parameters import parameters_text

from .formatting import (
    OPERATIONS,
    Family,
    family,
    format_count,
    wrap_text,
)
from .items import Group, Item, Leaf
from .outline import Outline
from .tree import UNICODE, TreeRow, tree_rows

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

COLUMN_TITLES = ("", "\ngives", "\nparameters", "forward\nFLOPs", "saved\nelements", "saved\nbytes")
OPTIONAL_COLUMNS = (1, 4)  # columns that are dropped on a narrow terminal, in this order
MIN_LAYER_WIDTH = 34  # characters: with fewer for the layers, a column is dropped
COLUMN_SPACING = 2
FAMILY_STYLES = {
    Family.TABLE: "yellow",
    Family.ATTENTION: "cyan",
    Family.EXPERTS: "magenta",
    Family.SCAN: "blue",
    Family.DENSE: "green",
}


def table(o: Outline, guides: Sequence[str] = UNICODE, width: int | None = None) -> Table:
    """Return the table of a model. With `width`, it drops columns that do not fit."""
    from rich.table import Table
    from rich.text import Text

    rows = tree_rows(o, guides)
    shown, layer_width = _fitting_columns(rows, width)
    out = Table(box=None, padding=(0, COLUMN_SPACING, 0, 0), header_style="dim")
    for i in shown:
        out.add_column(Text(COLUMN_TITLES[i]), justify="left" if i < 2 else "right", overflow="fold")
    for row in rows:
        shape, *figures = row.cells
        quiet = "dim" if isinstance(row.item, Group) and row.item.layer else ""
        cells = [Text.assemble(*_layer(row, layer_width)), Text(shape, "dim"), *(Text(text, quiet) for text in figures)]
        out.add_row(*(cells[i] for i in shown))
    return out


def _fitting_columns(rows: Sequence[TreeRow], width: int | None) -> tuple[list[int], int]:
    """Return the columns that fit, and the width left for the layers in characters; 0 for no limit."""
    shown = list(range(len(COLUMN_TITLES)))
    if width is None:
        return shown, 0
    cells = [("", *row.cells) for row in rows]
    columns = [(*COLUMN_TITLES[i].split("\n"), *(row_cells[i] for row_cells in cells)) for i in shown]
    widths = [max(map(len, column)) + COLUMN_SPACING for column in columns]
    for optional in OPTIONAL_COLUMNS:
        if width - sum(widths[i] for i in shown) - COLUMN_SPACING < MIN_LAYER_WIDTH:
            shown.remove(optional)
    return shown, max(MIN_LAYER_WIDTH, width - sum(widths[i] for i in shown) - COLUMN_SPACING)


def _layer(row: TreeRow, layer_width: int) -> list[tuple[str, str]]:
    """Return the title of a row as (text, style) pieces, wrapped to the width."""
    style = _style(row.item)
    first, *rest = (
        wrap_text(row.title, layer_width - len(row.continuation_guide) - COLUMN_SPACING) if layer_width else [row.title]
    )
    more = [piece for part in rest for piece in (("\n" + row.continuation_guide + "  ", "dim"), (part, style))]
    return [(row.guide, "dim"), (first, style), *more]


def _style(item: Item | None) -> str:
    if isinstance(item, Leaf):
        return FAMILY_STYLES.get(family(item.node), "")
    return "bold" if item is None or item.layer is None else ""


def heading(o: Outline) -> str:
    """Return one line with the model's name, its parameters and the size of the batch."""
    sequences = f"{o.batch:,} sequences" if o.batch > 1 else "one sequence"
    source = "" if o.source is None else f", with {o.source:,} source tokens each"
    return f"{o.model.name}: {parameters_text(o.model)}; for {sequences} of {o.seq:,} tokens{source}"


def footer(o: Outline, precision: str) -> str:
    """Return the FLOPs of a training step, the meaning of the saved columns, and the fields without effect."""
    f = o.figures
    unused = f"\nfields of the config.json without effect: {', '.join(o.model.unused)}" if o.model.unused else ""
    passes = {"forward": f.forward, "dgrad": f.dgrad, "wgrad": f.wgrad}
    text = ", ".join(f"{name} {format_count(n, OPERATIONS)}" for name, n in passes.items())
    return (
        f"a training step: {format_count(sum(passes.values()), OPERATIONS)} FLOPs ({text})\n"
        f"saved: tensors kept for the backward pass if nothing is recomputed, with activations in {precision}{unused}"
    )


def report(o: Outline, precision: str, guides: Sequence[str] = UNICODE, width: int | None = None) -> RenderableType:
    """Return heading, table and footer of a model."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(heading(o) + "\n"), table(o, guides, width), Text("\n" + footer(o, precision)))
