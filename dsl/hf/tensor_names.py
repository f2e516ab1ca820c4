"""What a checkpoint of Hugging Face calls a model's weights, and how it lays them out, as data.

Protocol: `Names` says what each tensor of a checkpoint holds: which of our weights, in which order of their dims.
`tensors` finds them in a model; `state` takes weights from a checkpoint and gives them to one by that.

A weight that a node made is known here by its place in its layer: `rms_norm.1.scale` is of the second RMSNorm of the
layer. Layers lie in blocks (the iterations of a `repeat`); one ends where its block does, or where a node comes that
has no place in it any more: where a layer has two, a third RMSNorm opens the next. Outside of blocks nodes are counted
among themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from types import EllipsisType
from typing import TypeAlias

from attrs import field, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import (
    Graph,
    Model,
    Node,
    Slot,
    graph,
)


class Mark(Enum):
    """Where in a layout the weights of one tensor follow one another: along what comes after the mark in its axis."""

    JOIN = "join"


JOIN = Mark.JOIN


@frozen
class Square:
    """A dim of the pixels of a square, of this many channels: three axes, channels, height and width."""

    dim: str
    channels: int


Part: TypeAlias = str | int | EllipsisType | Mark
Axes: TypeAlias = tuple[Part | Square | tuple[Part, ...], ...]


@frozen
class Stored:
    """One tensor of a checkpoint: our weights that it holds, and its axes.

    An axis is a dim, several (the first outermost), or 1 for none. `...` stands for all dims that are not named, as one
    axis unless it stands among others. Dims that the tensor's name has in braces, {experts}, have one tensor an index.
    """

    weights: tuple[str, ...]
    axes: Axes


Tensors: TypeAlias = Mapping[str, Stored | tuple[Stored, ...]]  # several: of one of them the weights are there


@frozen
class Names:
    """The tensors of a checkpoint: those outside of all layers by their full names, and those of layers.

    The layers that are alike are under what all their names begin with, which has {layer} for the layer's number.
    unused: what the names of tensors begin with that change no output; {layer} is for any number, {beyond} for those
    after the last layer's. copies: tensors that are there a second time, and what they must equal. zero: tensors that
    must be zero, and then change nothing. older: what names in older checkpoints begin with, and what it is now.
    """

    outside: Tensors = field(hash=False)
    layers: Mapping[str, Tensors] = field(factory=dict, hash=False)
    unused: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(factory=dict, hash=False)
    zero: tuple[str, ...] = ()
    older: Mapping[str, str] = field(factory=dict, hash=False)

    def now(self, name: str) -> str:
        """What the tensor of this name in a checkpoint, old or new, is called now."""
        old = next((o for o in self.older if name.startswith(o)), "")
        return self.older.get(old, "") + name.removeprefix(old)


def flat(*weights: str) -> Stored:
    """A vector: all dims as one axis. Several weights follow one another."""
    return Stored(weights, ((JOIN, ...),))


def rows(*weights: str, dim: str = "embed") -> Stored:
    """[dim, the others]. Several weights follow one another along the others."""
    return Stored(weights, (dim, (JOIN, ...)))


def columns(*weights: str, dim: str = "embed") -> Stored:
    """[the others, dim]. Several weights follow one another along the others."""
    return Stored(weights, ((JOIN, ...), dim))


@frozen
class Tensor:
    """One entry of the names, found in a model: the weights that it holds, in their slots."""

    name: str
    slots: tuple[Slot, ...]
    axes: Axes


def tensors(names: Names, model: Model) -> tuple[Tensor, ...]:
    """The tensors that a checkpoint of this model has. Raises UserError for weights that the names do not say."""
    g = graph(model)
    found = [*_found(names.outside, "", _outside(g))]
    for prefix, number, slots in _layers(names, g):
        found += _found(names.layers[prefix], prefix.replace("{layer}", str(number)), slots)
    have = {s.name for t in found for s in t.slots}
    if missing := [name for name in g.weights if name not in have]:
        raise UserError(f"the names say nothing of {some(missing)}, of model {model.name!r}")
    return tuple(found)


def _found(entries: Tensors, prefix: str, slots: Mapping[str, Slot]) -> Iterator[Tensor]:
    """The tensors whose weights are among these, by their places, and have the dims that their axes name."""
    for name, stored in _each(entries):
        named = {part for axis in stored.axes for part in parts(axis) if isinstance(part, str)}
        present = [w for w in stored.weights if w in slots and named.issubset(d.name for d in slots[w].dims)]
        if present and len(present) < len(stored.weights):
            raise UserError(f"{prefix}{name} holds {', '.join(stored.weights)}, and only {', '.join(present)} is there")
        if present:
            yield Tensor(prefix + name, tuple(slots[w] for w in stored.weights), stored.axes)


def _each(entries: Tensors) -> Iterator[tuple[str, Stored]]:
    for name, stored in entries.items():
        yield from ((name, s) for s in (stored if isinstance(stored, tuple) else (stored,)))


def _outside(g: Graph) -> dict[str, Slot]:
    """The weights outside of blocks by their places, and those that no node made by their names."""
    counts: Counter[str] = Counter()
    out = {s.name: s for n in g.nodes for s in n.weights if not _own(n, s)}
    for n in g.nodes:
        if n.block is None:
            out.update(_placed(n, counts))
    return out


def _layers(names: Names, g: Graph) -> Iterator[tuple[str, int, dict[str, Slot]]]:
    """Each layer: what its tensors' names begin with, its number, and its weights by their places."""
    blocks: dict[int, list[Node]] = {}
    for n in g.nodes:
        if n.block is not None and any(_own(n, s) for s in n.weights):
            blocks.setdefault(n.block, []).append(n)
    numbers: Counter[str] = Counter()
    for nodes in blocks.values():
        for prefix, tensors in names.layers.items():
            if (found := _parts(nodes, tensors)) is not None:
                for slots in found:
                    yield prefix, numbers[prefix], slots
                    numbers[prefix] += 1
                break


def _parts(nodes: Iterable[Node], tensors: Tensors) -> list[dict[str, Slot]] | None:
    """The layers that a block consists of, or None if it has a weight that these tensors do not hold."""
    known = {w for _, t in _each(tensors) for w in t.weights}
    places = {".".join(w.split(".")[:2]) for w in known}
    out: list[dict[str, Slot]] = []
    counts: Counter[str] = Counter()
    for n in nodes:
        if not out or f"{_kind(n)}.{counts[_kind(n)]}" not in places:
            counts = Counter()
            out.append({})
        placed = _placed(n, counts)
        if not known.issuperset(placed):
            return None
        out[-1].update(placed)
    return out


def _placed(n: Node, counts: Counter[str]) -> dict[str, Slot]:
    """A node's own weights by their places; the node is counted."""
    place = f"{_kind(n)}.{counts[_kind(n)]}"
    counts[_kind(n)] += 1
    return {place + s.name.removeprefix(n.name): s for s in n.weights if _own(n, s)}


def _own(n: Node, s: Slot) -> bool:
    return s.name.startswith(n.name + ".")


def _kind(n: Node) -> str:
    return n.name.rpartition(".")[0]


def parts(axis: Part | Square | tuple[Part, ...]) -> tuple[Part, ...]:
    """What an axis is made of."""
    if isinstance(axis, Square):
        return (axis.dim,)
    return axis if isinstance(axis, tuple) else (axis,)


def some(names: list[str]) -> str:
    """The first few of these names."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
