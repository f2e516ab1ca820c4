"""The tensor names of Hugging Face checkpoints, and the order of dims in each tensor, as data.

`Names` lists the tensors of an architecture and the weights that each holds. `checkpoint_tensors` finds these weights
in a model. `state_dict` uses them to convert weights in both directions.

A weight of a node is named by its position in its layer: `rms_norm.1.scale` belongs to the second RMSNorm of the layer.
Layers lie in blocks (the iterations of a `repeat`). A layer ends with its block, or before a node that has no position
left in it: if a layer has two RMSNorms, a third one begins the next layer. Nodes outside of blocks are numbered among
themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from types import EllipsisType
from typing import TypeAlias

from attrs import field, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Graph, Model, graph
from megaloom.dsl.node import Node, Slot


class Mark(Enum):
    """A mark in an axis: the weights of a tensor are concatenated along the part of the axis that follows it."""

    JOIN = "join"


JOIN = Mark.JOIN


@frozen
class Square:
    """A dim of pixels of a square patch, stored as three axes: channels, height, width."""

    dim: str
    channels: int


@frozen
class GroupsOf:
    """The dim `groups`, or for a weight that has `members` instead, as many equal parts of these, in their order."""

    groups: str
    members: str


Part: TypeAlias = str | int | EllipsisType | Mark | GroupsOf
Axes: TypeAlias = tuple[Part | Square | tuple[Part, ...], ...]


@frozen
class Stored:
    """One tensor of a checkpoint: the weights that it holds, and its axes.

    An axis is a dim, several dims (the first is the outermost), or 1 for none. `...` stands for all dims that are not
    named, merged into one axis. A dim in braces in the name of the tensor, such as {experts}, has one tensor per index.
    """

    weights: tuple[str, ...]
    axes: Axes


Tensors: TypeAlias = Mapping[str, Stored | tuple[Stored, ...]]  # several: the one whose weights the model has


@frozen
class Names:
    """The tensors of a checkpoint by name.

    outside: tensors outside of all layers. layers: tensors of each kind of layer, under the prefix of their names, with
    {layer} for the number of the layer. unused: prefixes of tensors that do not change the output; {layer} is any
    number, {beyond} a number after that of the last layer. copies: tensors that repeat another one, which they must
    equal. zero: tensors that must be zero. older: prefixes in older checkpoints, and what they are today.
    """

    outside: Tensors = field(hash=False)
    layers: Mapping[str, Tensors] = field(factory=dict, hash=False)
    unused: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(factory=dict, hash=False)
    zero: tuple[str, ...] = ()
    older: Mapping[str, str] = field(factory=dict, hash=False)

    def current(self, name: str) -> str:
        """Return today's name of a tensor that an older checkpoint may name differently."""
        old = next((o for o in self.older if name.startswith(o)), "")
        return self.older.get(old, "") + name.removeprefix(old)


def flat(*weights: str) -> Stored:
    """Return a tensor with all dims merged into one axis. Several weights are concatenated."""
    return Stored(weights, ((JOIN, ...),))


def rows(*weights: str, dim: str = "embed") -> Stored:
    """Return a tensor [dim, other dims]. Several weights are concatenated along the other dims."""
    return Stored(weights, (dim, (JOIN, ...)))


def columns(*weights: str, dim: str = "embed") -> Stored:
    """Return a tensor [other dims, dim]. Several weights are concatenated along the other dims."""
    return Stored(weights, ((JOIN, ...), dim))


@frozen
class Tensor:
    """One tensor of a checkpoint of a given model, with the weight slots that it holds."""

    name: str
    slots: tuple[Slot, ...]
    axes: Axes


def checkpoint_tensors(names: Names, model: Model) -> tuple[Tensor, ...]:
    """Return the tensors of a checkpoint of this model. Raises UserError for a weight that no tensor holds."""
    g = graph(model)
    tensors = [*_present(names.outside, "", _outside(g))]
    for prefix, number, slots in _layers(names, g):
        tensors += _present(names.layers[prefix], prefix.replace("{layer}", str(number)), slots)
    have = {s.name for t in tensors for s in t.slots}
    if missing := [name for name in g.weights if name not in have]:
        raise UserError(f"no tensor name for {first_few(missing)} of model {model.name!r}")
    return tuple(tensors)


def _present(entries: Tensors, prefix: str, slots: Mapping[str, Slot]) -> Iterator[Tensor]:
    """Yield the tensors whose weights are in `slots` and have the dims that the axes name."""
    for name, stored in _each(entries):
        named = {part for axis in stored.axes for part in axis_parts(axis) if isinstance(part, str)}
        present = [w for w in stored.weights if w in slots and named.issubset(d.name for d in slots[w].dims)]
        if present and len(present) < len(stored.weights):
            raise UserError(
                f"{prefix}{name} holds {', '.join(stored.weights)}, but the model has only {', '.join(present)}"
            )
        if present:
            yield Tensor(prefix + name, tuple(slots[w] for w in stored.weights), stored.axes)


def _each(entries: Tensors) -> Iterator[tuple[str, Stored]]:
    for name, stored in entries.items():
        yield from ((name, s) for s in (stored if isinstance(stored, tuple) else (stored,)))


def _outside(g: Graph) -> dict[str, Slot]:
    """Return the weights of nodes outside of blocks by position, and shared weights by name."""
    counts: Counter[str] = Counter()
    out = {s.name: s for n in g.nodes for s in n.weights if not _own(n, s)}
    for n in g.nodes:
        if n.block is None:
            out.update(_by_position(n, counts))
    return out


def _layers(names: Names, g: Graph) -> Iterator[tuple[str, int, dict[str, Slot]]]:
    """Yield the layers: prefix of the tensor names, number of the layer, weights by position."""
    blocks: dict[int, list[Node]] = {}
    for n in g.nodes:
        if n.block is not None and any(_own(n, s) for s in n.weights):
            blocks.setdefault(n.block, []).append(n)
    numbers: Counter[str] = Counter()
    for nodes in blocks.values():
        for prefix, tensors in names.layers.items():
            if (layers := _split_into_layers(nodes, tensors)) is not None:
                for slots in layers:
                    yield prefix, numbers[prefix], slots
                    numbers[prefix] += 1
                break


def _split_into_layers(nodes: Iterable[Node], tensors: Tensors) -> list[dict[str, Slot]] | None:
    """Return the layers of a block, or None if the block has a weight that these tensors do not hold."""
    known = {w for _, t in _each(tensors) for w in t.weights}
    positions = {".".join(w.split(".")[:2]) for w in known}
    out: list[dict[str, Slot]] = []
    counts: Counter[str] = Counter()
    for n in nodes:
        if not out or f"{_kind(n)}.{counts[_kind(n)]}" not in positions:
            counts = Counter()
            out.append({})
        own = _by_position(n, counts)
        if not known.issuperset(own):
            return None
        out[-1].update(own)
    return out


def _by_position(n: Node, counts: Counter[str]) -> dict[str, Slot]:
    """Return the weights of a node by position, and count the node."""
    position = f"{_kind(n)}.{counts[_kind(n)]}"
    counts[_kind(n)] += 1
    return {position + s.name.removeprefix(n.name): s for s in n.weights if _own(n, s)}


def _own(n: Node, s: Slot) -> bool:
    return s.name.startswith(n.name + ".")


def _kind(n: Node) -> str:
    return n.name.rpartition(".")[0]


def axis_parts(axis: Part | Square | tuple[Part, ...]) -> tuple[Part, ...]:
    """Return the dims and marks of an axis."""
    if isinstance(axis, Square):
        return (axis.dim,)
    return axis if isinstance(axis, tuple) else (axis,)


def first_few(names: list[str]) -> str:
    """Return the first five names as text."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
