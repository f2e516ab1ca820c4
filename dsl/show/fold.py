"""Folding of an outline: consecutive equal items become one item with a number of repetitions.

`Fold(figures).fold_chain(items, entry)` folds a chain of items and the items inside them. `resolve_names` then replaces
the names of removed nodes by the nodes that represent them. Items are equal if they have equal layers, shapes and
figures, and read the same nodes or nodes at equal distances above them.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, evolve, field, frozen

from megaloom.dsl.facts.primitives import program

from .figures import NodeFigures
from .items import (
    Group,
    Item,
    Leaf,
    inputs_of,
    leaves,
)


@frozen
class _Signature:
    """The properties that equal items share: a number for their form, and each read as (distance, node name).

    The distance counts items upwards from the reading item.
    """

    form: int
    reads: tuple[tuple[object, str], ...]


@define
class Fold:
    """The state of folding. `representatives` maps each removed node to the equal node that remains."""

    node_figures: NodeFigures
    representatives: dict[str, str] = field(factory=dict)
    forms: dict[object, int] = field(factory=dict)

    def fold_chain(self, items: Sequence[Item], entry: Sequence[str]) -> list[Item]:
        """Return the chain with figures, folded at this level and inside its groups. `entry` are the nodes above it."""
        inner = [self.fold_inside(item) for item in items]
        return self.merge_repeats(inner, self.signatures(inner, entry))

    def fold_inside(self, item: Item) -> Item:
        """Return a group with its items folded, or a leaf with its figures."""
        if isinstance(item, Group):
            return evolve(item, items=tuple(self.fold_chain(item.items, [item.entry])))
        name = item.out
        return evolve(item, figures=self.node_figures.figures[name], tied=self.node_figures.tied[name])

    def representative(self, name: str) -> str:
        """Return the node that represents this one; itself if it was not removed."""
        while name in self.representatives:
            name = self.representatives[name]
        return name

    def signatures(self, items: Sequence[Item], entry: Sequence[str]) -> list[_Signature]:
        """Return the signature of each item of a chain."""
        positions: dict[str, tuple[int, int | None]] = {self.representative(name): (-1, None) for name in entry}
        out = []
        for i, item in enumerate(items):
            inside = {leaf.out: (i, j) for j, leaf in enumerate(leaves([item]))}
            seen: list[tuple[object, str]] = []
            for name in (self.representative(name) for leaf in leaves([item]) for name in leaf.inputs):
                index, leaf_index = (positions | inside).get(name, (None, None))
                distance = name if index is None else (i - index, leaf_index)
                seen.append((distance, "" if name in inside else name))
            out.append(_Signature(self.forms.setdefault(_form(item), len(self.forms)), tuple(seen)))
            positions |= inside | {self.representative(item.out): (i, None)}
        return out

    def merge_repeats(self, items: Sequence[Item], signatures: Sequence[_Signature]) -> list[Item]:
        """Return the chain with each run of equal items, or of equal sequences of items, as one repeated group."""
        out: list[Item] = []
        i = 0
        while i < len(items):
            length, times = _best_repeat(signatures[i:])
            head = items[i : i + length]
            if times == 1:
                out += head
            else:
                others = items[i + length : i + length * times]
                self.record_representatives(head, others)
                group = self.make_repeat(head, signatures[i : i + length])
                out.append(evolve(group, last_out=others[-1].last_out, times=times))
            i += length * times
        return out

    def record_representatives(self, head: Sequence[Item], others: Sequence[Item]) -> None:
        """Map each leaf of the removed items to the leaf of `head` that represents it."""
        for i in range(0, len(others), len(head)):
            for representative, other in zip(leaves(head), leaves(others[i : i + len(head)]), strict=True):
                self.representatives[other.out] = representative.out

    def make_repeat(self, head: Sequence[Item], signatures: Sequence[_Signature]) -> Group:
        """Return a group for the repetition of `head`: its only item if that is a group, else a new group."""
        only = head[0]
        if len(head) == 1 and isinstance(only, Group) and only.layer is None and only.times == 1:
            return only
        items, entry = tuple(self.merge_repeats(head, signatures)), "".join(inputs_of(only)[:1])
        return Group(None, items, entry, head[-1].out, head[-1].last_out)

    def resolve_names(self, item: Item) -> Item:
        """Return the item with the names of removed nodes replaced. A block of one item becomes that item."""
        if isinstance(item, Leaf):
            return evolve(item, inputs=tuple(dict.fromkeys(map(self.representative, item.inputs))))
        items = tuple(map(self.resolve_names, item.items))
        if item.layer is None and item.times == len(items) == 1:
            return items[0]
        return evolve(item, items=items, entry=self.representative(item.entry), out=self.representative(item.out))


def _form(item: Item) -> object:
    """Return a value that is equal for items of equal layers, shapes and figures, whatever they read."""
    if isinstance(item, Leaf):
        return program(item.node), item.figures, item.tied
    return type(item.layer), item.times, tuple(map(_form, item.items))


def _best_repeat(signatures: Sequence[_Signature]) -> tuple[int, int]:
    """Return (length, repetitions) of the repeated sequence at the beginning that covers the most items."""
    best = 1, 1
    for length in range(1, len(signatures) // 2 + 1):
        times = _repetitions(signatures, length)
        if times > 1 and length * times > best[0] * best[1]:
            best = length, times
        if best[0] * best[1] == len(signatures):
            break
    return best


def _repetitions(signatures: Sequence[_Signature], length: int) -> int:
    """Return how often the first `length` items occur consecutively.

    A repetition counts if each of its reads has the distance, or the node name, that it has in the first one.
    """
    head, times = signatures[:length], 1
    same = [(True, True) for signature in head for _ in signature.reads]
    forms = [h.form for h in head]
    while (after := signatures[length * times : length * (times + 1)]) and [a.form for a in after] == forms:
        pairs = [pair for h, a in zip(head, after, strict=True) for pair in zip(h.reads, a.reads, strict=True)]
        same = [
            (distance and a[0] == b[0], name and a[1] == b[1])
            for (a, b), (distance, name) in zip(pairs, same, strict=True)
        ]
        if not all(map(any, same)):
            break
        times += 1
    return times
