"""The outline of a model as rows of a tree, one per layer; a table or page prints them.

The row of a group has the figures of all its repetitions; the rows inside it are one repetition. So the figures of the
outermost rows add up to the last row, the total.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen

from megaloom.dsl.combine import Residual
from megaloom.dsl.value import Pointwise

from .figures import ZERO, Figures, size
from .formatting import (
    OPERATIONS,
    declared,
    format_bytes,
    format_count,
)
from .items import (
    Group,
    Item,
    Leaf,
    inputs_of,
)
from .outline import Outline

UNICODE, ASCII = (
    ("│  ", "├─ ", "└─ ", "   "),
    ("|  ", "|- ", "`- ", "   "),
)  # continuing branch, item, last item, no branch


@frozen
class TreeRow:
    """A row: the guide lines of the tree, a title, the output shape, and figures.

    continuation_guide: the guide lines where the title wraps. depth: the number of rows that contain this one.
    """

    title: str
    guide: str = ""
    continuation_guide: str = ""
    depth: int = 0
    item: Item | None = None
    shape: str = ""
    figures: Figures = ZERO
    tied: tuple[str, ...] = ()

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the texts of the columns after the title; "" for zero."""
        f = self.figures
        params = [format_count(f.params)] * (f.params > 0) + ["tied"] * bool(self.tied)
        numbers = (
            " + ".join(params),
            format_count(f.forward, OPERATIONS),
            format_count(f.saved),
            format_bytes(f.nbytes),
        )
        return self.shape, *("" if text in ("0", "0 B") else text for text in numbers)


@frozen
class _Position:
    """An item with its position: below the node `previous`, in a group whose input is the node `entry`.

    last: for each enclosing group and the item, outermost first, whether it is the last of its siblings.
    """

    item: Item
    previous: str
    entry: str
    last: tuple[bool, ...]

    @property
    def distant_inputs(self) -> tuple[str, ...]:
        """Return the nodes that the item reads, apart from `previous` and `entry`."""
        return tuple(name for name in inputs_of(self.item) if name not in (self.previous, self.entry))

    @property
    def rereads_entry(self) -> bool:
        """Return whether the item reads the group's input, and this is not the node above it."""
        return self.previous != self.entry and self.entry in inputs_of(self.item)

    def guide(self, guides: Sequence[str], first: bool = True) -> str:
        """Return the guide lines of the item's first line, or of its continuation lines; "" at the top level."""
        beside, before, ending, below = guides
        around = ["", *(below if last else beside for last in self.last[1:])]
        if first and self.last[1:]:
            around[-1] = ending if self.last[-1] else before
        return "".join(around)


def _positions(items: Sequence[Item], entry: str = "", around: tuple[bool, ...] = ()) -> Iterator[_Position]:
    """Yield the position of each item, followed by those of its visible items."""
    previous = entry
    for item in items:
        last = (*around, item is items[-1])
        yield _Position(item, previous, entry, last)
        if isinstance(item, Group):
            yield from _positions(_visible_items(item), item.entry, last)
        previous = item.out


def _visible_items(group: Group) -> tuple[Item, ...]:
    """Return the items of a group, without the addition of a residual: its title `x +` says that."""
    last = group.items[-1]
    added = isinstance(last, Leaf) and last.node.op == Pointwise("add") and last.figures == ZERO
    return group.items[:-1] if added and isinstance(group.layer, Residual) else group.items


def title(item: Item) -> str:
    """Return the title of an item: a layer as declared, `x +` for a residual, `repeat 4x`."""
    if isinstance(item, Leaf):
        return declared(item.node.op)
    if item.layer is not None:
        return "x +" if isinstance(item.layer, Residual) else type(item.layer).__name__
    return f"repeat {item.times}x" if item.times > 1 else "block"


def guides_for(encoding: str | None) -> Sequence[str]:
    """Return the guide characters that an encoding can represent."""
    try:
        "".join(UNICODE).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def tree_rows(o: Outline, guides: Sequence[str] = UNICODE) -> list[TreeRow]:
    """Return the rows of a model from top to bottom; the last is the total."""
    all_positions = [position for column in o.columns for position in _positions(column)]
    wanted = {name for position in all_positions for name in position.distant_inputs}
    names: dict[str, _Position] = {}  # the outermost item of each name
    for position in all_positions:
        if position.item.out in wanted:
            names.setdefault(position.item.out, position)
    out = [_row(position, guides, names) for position in all_positions]
    for s in o.shared:
        figures = Figures(params=size(s))
        out.append(TreeRow(f"{s.name}, shared by repeats", shape=str(s.value.shape), figures=figures))
    return [*out, TreeRow("total", figures=o.figures)]


def _row(position: _Position, guides: Sequence[str], names: Mapping[str, _Position]) -> TreeRow:
    item, text = position.item, title(position.item)
    shape, tied = (str(item.node.shape), item.tied) if isinstance(item, Leaf) else ("", ())
    if distant_inputs := ["x"] * position.rereads_entry + [
        names[name].item.last_out for name in position.distant_inputs
    ]:
        text += f" reads {', '.join(distant_inputs)}"
    if names.get(item.out) is position and item.last_out != text:
        text += f" as {item.last_out}"
    guide, continuation_guide = position.guide(guides), position.guide(guides, first=False)
    return TreeRow(text, guide, continuation_guide, len(position.last) - 1, item, shape, item.figures, tied)
