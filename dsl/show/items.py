"""Items of an outline: `Leaf`, a node of the graph, and `Group`, a list of items."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import frozen

from megaloom.dsl.layer import Layer
from megaloom.dsl.node import Node

from .figures import ZERO, Figures, total


@frozen
class Leaf:
    """A node with its figures. `tied` are the names of its weights that are counted at another node."""

    node: Node
    inputs: tuple[str, ...]
    figures: Figures = ZERO
    tied: tuple[str, ...] = ()

    @property
    def out(self) -> str:
        """Return the name of the node."""
        return self.node.name

    @property
    def last_out(self) -> str:
        """Return the name of the node, which is also its last repetition."""
        return self.node.name


@frozen
class Group:
    """The items of a layer, or of a repeat's iteration (`layer` is None), with a number of repetitions.

    entry: the node whose value the first repetition reads; "" for a weight.
    out, last_out: the nodes whose values leave the first and the last repetition.
    """

    layer: Layer | None
    items: tuple[Item, ...]
    entry: str
    out: str
    last_out: str
    times: int = 1

    @property
    def iteration_figures(self) -> Figures:
        """Return the figures of one repetition."""
        return total(item.figures for item in self.items)

    @property
    def figures(self) -> Figures:
        """Return the figures of all repetitions."""
        return self.iteration_figures * self.times


Item = Leaf | Group


def leaves(items: Iterable[Item]) -> Iterator[Leaf]:
    """Yield every leaf of the items, from top to bottom."""
    for item in items:
        if isinstance(item, Leaf):
            yield item
        else:
            yield from leaves(item.items)


def inputs_of(item: Item) -> tuple[str, ...]:
    """Return the nodes that an item reads; for a group, its entry."""
    return item.inputs if isinstance(item, Leaf) else (item.entry,) * bool(item.entry)
