"""What an outline is made of: nodes of the graph, and groups of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import frozen

from megaloom.dsl.graph import Node
from megaloom.dsl.layer import Layer

from .figures import NOUGHT, Figures, total


@frozen
class Leaf:
    """A node, what it costs, the nodes that it reads, and the names of its weights that are counted elsewhere."""

    node: Node
    inputs: tuple[str, ...]
    figures: Figures = NOUGHT
    tied: tuple[str, ...] = ()

    @property
    def out(self) -> str:
        """The name of what it gives."""
        return self.node.name

    @property
    def end(self) -> str:
        """The same: it stands for all times."""
        return self.node.name


@frozen
class Group:
    """Items that belong together, some times over: what a layer is made of or, where that is None, one iteration.

    entry and out: the nodes whose values go in ("" where that is a weight) and come out, the first time. end: what
    comes out the last time.
    """

    layer: Layer | None
    items: tuple[Item, ...]
    entry: str
    out: str
    end: str
    times: int = 1

    @property
    def once(self) -> Figures:
        """What it costs one time."""
        return total(item.figures for item in self.items)

    @property
    def figures(self) -> Figures:
        """What it costs all the times."""
        return self.once * self.times


Item = Leaf | Group


def leaves(items: Iterable[Item]) -> Iterator[Leaf]:
    """Every leaf of these items, from top to bottom."""
    for item in items:
        if isinstance(item, Leaf):
            yield item
        else:
            yield from leaves(item.items)


def reads(item: Item) -> tuple[str, ...]:
    """The nodes that an item reads; of a group, the first."""
    return item.inputs if isinstance(item, Leaf) else (item.entry,) * bool(item.entry)
