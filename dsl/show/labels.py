"""What is written on the items of a drawing, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megaloom.dsl.combine import Residual
from megaloom.dsl.value import Pointwise

from .figures import Figures
from .items import Item, Leaf
from .tree import title
from .words import (
    OPERATIONS,
    count,
    folded,
    nbytes,
)

# The width of a character of each kind of text, in pixels: 0.61 em of a font of one width, more than that of others.
WIDTH: Mapping[str, float] = {"name": 8.0, "as": 6.8, "shape": 6.8, "figures": 6.2}
ROOM = 44  # characters of a line
SIGNS = {"add": "+", "mul": "×"}


def sign(item: Item) -> str:
    """The sign of a sum or a product, which is all that is written on it; "" for anything else."""
    op = item.node.op if isinstance(item, Leaf) else None
    return SIGNS.get(op.fn, "") if isinstance(op, Pointwise) else ""


def placard(item: Item) -> tuple[tuple[str, str], ...]:
    """The lines of an item, each after what it is: its name, what it was made as, its shape, its figures."""
    if isinstance(item, Leaf):
        return () if sign(item) else tuple(_leaf(item))
    if isinstance(item.layer, Residual):
        return ()
    name = f"{item.times}×" if item.times > 1 else title(item)
    return ("name", name), ("figures", figures(item.figures))


def _leaf(item: Leaf) -> Iterator[tuple[str, str]]:
    name, _, given = title(item).partition("(")
    yield "name", name
    if said := given.removesuffix(")"):
        for line in folded(said, ROOM):
            yield "as", line
    yield "shape", str(item.node.shape)
    if said := figures(item.figures, tied=bool(item.tied)):
        yield "figures", said


def figures(f: Figures, tied: bool = False) -> str:
    """What something costs, in a line; "" for what costs nothing."""
    said = [f"{count(f.params)} parameters"] * bool(f.params) + ["tied weights"] * tied
    said += [f"{count(f.forward, OPERATIONS)} FLOPs"] * bool(f.forward) + [f"{nbytes(f.nbytes)} saved"] * bool(f.nbytes)
    return " · ".join(said)
