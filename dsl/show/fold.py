"""Equal neighbours as one item that is repeated.

Protocol: `Fold(account).level(items, entry)` folds a chain of items, and what is inside them, into fewer that stand for
all; `settled` then names what these read by the nodes that are left. Items are equal if they have the same layers on
the same shapes with the same figures, and read the same, or what is as far above.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, evolve, field, frozen

from megaloom.dsl.facts.primitives import program

from .figures import Account
from .items import (
    Group,
    Item,
    Leaf,
    leaves,
    reads,
)


@frozen
class _Like:
    """What equal items have in common: a number for their form, and all that they read, each as two places.

    The first is seen from the item (so many items above), the second is absolute (a name).
    """

    form: int
    reads: tuple[tuple[object, str], ...]


@define
class Fold:
    """The state of folding: `first` knows every node that is left out, by the one like it that is kept."""

    accounts: Account
    first: dict[str, str] = field(factory=dict)
    forms: dict[object, int] = field(factory=dict)

    def level(self, items: Sequence[Item], entry: Sequence[str]) -> list[Item]:
        """The items of a chain that begins with these, with their figures, folded within and among themselves."""
        inner = [self.within(item) for item in items]
        return self.folded(inner, self.likes(inner, entry))

    def within(self, item: Item) -> Item:
        """An item whose own items are folded, or a node with its figures."""
        if isinstance(item, Group):
            return evolve(item, items=tuple(self.level(item.items, [item.entry])))
        name = item.out
        return evolve(item, figures=self.accounts.figures[name], tied=self.accounts.tied[name])

    def known(self, name: str) -> str:
        """The node that stands for this one."""
        while name in self.first:
            name = self.first[name]
        return name

    def likes(self, items: Sequence[Item], entry: Sequence[str]) -> list[_Like]:
        """Of each item what an equal one would have as well."""
        places: dict[str, tuple[int, int | None]] = {self.known(name): (-1, None) for name in entry}
        out = []
        for i, item in enumerate(items):
            inside = {leaf.out: (i, j) for j, leaf in enumerate(leaves([item]))}
            seen: list[tuple[object, str]] = []
            for name in (self.known(name) for leaf in leaves([item]) for name in leaf.inputs):
                at, which = (places | inside).get(name, (None, None))
                near = name if at is None else (i - at, which)
                seen.append((near, "" if name in inside else name))
            out.append(_Like(self.forms.setdefault(_form(item), len(self.forms)), tuple(seen)))
            places |= inside | {self.known(item.out): (i, None)}
        return out

    def folded(self, items: Sequence[Item], likes: Sequence[_Like]) -> list[Item]:
        """The items, each run of equal ones, or of equal sequences of them, as a group that is repeated."""
        out: list[Item] = []
        i = 0
        while i < len(items):
            length, times = _run(likes[i:])
            head = items[i : i + length]
            if times == 1:
                out += head
            else:
                others = items[i + length : i + length * times]
                self.drop(head, others)
                out.append(evolve(self.repeated(head, likes[i : i + length]), end=others[-1].end, times=times))
            i += length * times
        return out

    def drop(self, head: Sequence[Item], others: Sequence[Item]) -> None:
        """Note for each leaf of the others the one of the head that is kept in its place."""
        for i in range(0, len(others), len(head)):
            for kept, gone in zip(leaves(head), leaves(others[i : i + len(head)]), strict=True):
                self.first[gone.out] = kept.out

    def repeated(self, head: Sequence[Item], likes: Sequence[_Like]) -> Group:
        """The group that stands for items which come again: one that is a group already, or a new one of them."""
        only = head[0]
        if len(head) == 1 and isinstance(only, Group) and only.layer is None and only.times == 1:
            return only
        return Group(None, tuple(self.folded(head, likes)), "".join(reads(only)[:1]), head[-1].out, head[-1].end)

    def settled(self, item: Item) -> Item:
        """The item, with names of nodes that are kept alone; a block of one thing is that."""
        if isinstance(item, Leaf):
            return evolve(item, inputs=tuple(dict.fromkeys(map(self.known, item.inputs))))
        items = tuple(map(self.settled, item.items))
        if item.layer is None and item.times == len(items) == 1:
            return items[0]
        return evolve(item, items=items, entry=self.known(item.entry), out=self.known(item.out))


def _form(item: Item) -> object:
    """What must be equal of equal items, apart from what they read."""
    if isinstance(item, Leaf):
        return program(item.node), item.figures, item.tied
    return type(item.layer), item.times, tuple(map(_form, item.items))


def _run(likes: Sequence[_Like]) -> tuple[int, int]:
    """The length of the sequence that these begin with again and again, and how often: what covers the most of them."""
    best = 1, 1
    for length in range(1, len(likes) // 2 + 1):
        times = _times(likes, length)
        if times > 1 and length * times > best[0] * best[1]:
            best = length, times
        if best[0] * best[1] == len(likes):
            break
    return best


def _times(likes: Sequence[_Like], length: int) -> int:
    """How often the first so many come one after the other. All must read the same, or be the same way from theirs."""
    head, times = likes[:length], 1
    same = [(True, True) for like in head for _ in like.reads]
    while (after := likes[length * times : length * (times + 1)]) and [a.form for a in after] == [h.form for h in head]:
        pairs = [pair for h, a in zip(head, after, strict=True) for pair in zip(h.reads, a.reads, strict=True)]
        same = [(near and a[0] == b[0], far and a[1] == b[1]) for (a, b), (near, far) in zip(pairs, same, strict=True)]
        if not all(map(any, same)):
            break
        times += 1
    return times
