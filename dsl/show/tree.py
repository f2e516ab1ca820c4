"""The lines of a model: its outline as people read it, a layer a line, inside the lines of what it is a part of.

A line that has lines inside says what those come to, all its times; the lines inside a repeat are one time of it. So
the lines that no other is around add up to the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen

from megaloom.dsl.combine import Residual
from megaloom.dsl.value import Pointwise

from .figures import NOUGHT, Figures, size
from .items import (
    Group,
    Item,
    Leaf,
    reads,
)
from .outline import Outline
from .words import (
    OPERATIONS,
    count,
    nbytes,
    written,
)

UNICODE, ASCII = ("│  ", "├─ ", "└─ ", "   "), ("|  ", "|- ", "`- ", "   ")  # beside an item, before, before the last


@frozen
class Line:
    """A line of a table: the guides of the tree before it, what it says, what it gives, and its figures.

    under: the guides where what it says goes on below. depth: how many lines it is inside of.
    """

    title: str
    guide: str = ""
    under: str = ""
    depth: int = 0
    item: Item | None = None
    shape: str = ""
    figures: Figures = NOUGHT
    tied: tuple[str, ...] = ()

    @property
    def cells(self) -> tuple[str, ...]:
        """What stands beside the title; nothing where that is nought."""
        f = self.figures
        params = [count(f.params)] * (f.params > 0) + ["tied"] * bool(self.tied)
        numbers = (" + ".join(params), count(f.forward, OPERATIONS), count(f.saved), nbytes(f.nbytes))
        return self.shape, *("" if said in ("0", "0 B") else said for said in numbers)


@frozen
class Place:
    """An item where it stands: under `above`, in a group that `entry` goes into (both are names of nodes).

    last: whether it is the last there, and of each group around it whether that is, outermost first.
    """

    item: Item
    above: str
    entry: str
    last: tuple[bool, ...]

    @property
    def far(self) -> tuple[str, ...]:
        """What it reads that the item above does not give and that does not go into its group."""
        return tuple(name for name in reads(self.item) if name not in (self.above, self.entry))

    @property
    def again(self) -> bool:
        """Whether it reads what goes into its group, and the item above does not give that."""
        return self.above != self.entry and self.entry in reads(self.item)

    def guide(self, guides: Sequence[str], first: bool = True) -> str:
        """The guides of the tree before its first line, or before those after that; at the top there are none."""
        beside, before, ending, below = guides
        around = ["", *(below if last else beside for last in self.last[1:])]
        if first and self.last[1:]:
            around[-1] = ending if self.last[-1] else before
        return "".join(around)


def places(items: Sequence[Item], entry: str = "", around: tuple[bool, ...] = ()) -> Iterator[Place]:
    """Each of the items in its place, followed by those inside; not by the addition that "x +" says already."""
    above = entry
    for item in items:
        last = (*around, item is items[-1])
        yield Place(item, above, entry, last)
        if isinstance(item, Group):
            yield from places(inside(item), item.entry, last)
        above = item.out


def inside(group: Group) -> tuple[Item, ...]:
    """The items of a group, less the addition of a residual."""
    last = group.items[-1]
    added = isinstance(last, Leaf) and last.node.op == Pointwise("add") and last.figures == NOUGHT
    return group.items[:-1] if added and isinstance(group.layer, Residual) else group.items


def title(item: Item) -> str:
    """What an item is called."""
    if isinstance(item, Leaf):
        return written(item.node.op)
    if item.layer is not None:
        return "x +" if isinstance(item.layer, Residual) else type(item.layer).__name__
    return f"repeat {item.times}x" if item.times > 1 else "block"


def guides(encoding: str | None) -> Sequence[str]:
    """The guides that a file of this encoding can show."""
    try:
        "".join(UNICODE).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def lines(o: Outline, guides: Sequence[str] = UNICODE) -> list[Line]:
    """The lines of a model in their order, its total the last."""
    all_places = [place for column in o.columns for place in places(column)]
    wanted = {name for place in all_places for name in place.far}
    names: dict[str, Place] = {}  # the place of what is called by a name: the outermost
    for place in all_places:
        if place.item.out in wanted:
            names.setdefault(place.item.out, place)
    out = [_line(place, guides, names) for place in all_places]
    for s in o.shared:
        figures = Figures(params=size(s))
        out.append(Line(f"{s.name}, shared by repeats", shape=str(s.value.shape), figures=figures))
    return [*out, Line("total", figures=o.figures)]


def _line(place: Place, guides: Sequence[str], names: Mapping[str, Place]) -> Line:
    item, said = place.item, title(place.item)
    shape, tied = (str(item.node.shape), item.tied) if isinstance(item, Leaf) else ("", ())
    if far := ["x"] * place.again + [names[name].item.end for name in place.far]:
        said += f" reads {', '.join(far)}"
    if names.get(item.out) is place and item.end != said:
        said += f" as {item.end}"
    guide, under = place.guide(guides), place.guide(guides, first=False)
    return Line(said, guide, under, len(place.last) - 1, item, shape, item.figures, tied)
