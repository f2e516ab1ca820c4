"""The layout of weights in the tensors of a Hugging Face checkpoint: which axes hold which dims, and the shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isqrt, prod
from types import MappingProxyType

from attrs import frozen

from megaloom.dsl.dims import Dim
from megaloom.dsl.graph import Model
from megaloom.dsl.node import Slot

from .tensor_names import JOIN, Axes, GroupsOf, Names, Square, Tensor, axis_parts, checkpoint_tensors


@frozen
class WeightLayout:
    """The order of one weight's dims in a tensor, and the sizes of the tensor's axes.

    An axis with a JOIN mark counts as two: the dims before the mark, and those after it.
    """

    sizes: tuple[int, ...]  # of the weight, in the order of its slot
    order: tuple[int, ...]  # for each dim of the tensor, its index in the slot
    axes: tuple[int, ...]
    joined: int | None  # the index of the axis after the mark


@frozen
class StoredTensor:
    """One tensor of a checkpoint: its name and shape, the weights that it holds, and their layouts.

    index: None, or a dim of the weights and the index of it that this tensor holds: one of the experts.
    """

    name: str
    slots: tuple[Slot, ...]
    layouts: tuple[WeightLayout, ...]
    index: tuple[Dim, int] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the tensor's axes."""
        first, at = self.layouts[0], self.layouts[0].joined
        if at is None:
            return first.axes
        return (*first.axes[: at - 1], first.axes[at - 1] * self.joined_size, *first.axes[at + 1 :])

    @property
    def joined_size(self) -> int:
        """The sum of the sizes along the axis after the JOIN mark."""
        return sum(x.axes[x.joined] for x in self.layouts if x.joined is not None)


def stored_tensors(names: Names, model: Model) -> Iterator[StoredTensor]:
    """Yield all tensors of a checkpoint of this model. Raises UserError for a weight that no tensor holds."""
    tensors = checkpoint_tensors(names, model)
    sizes: dict[str, dict[str, int]] = {}  # of the dims of all weights of a layer
    for s in (s for t in tensors for s in t.slots):
        sizes.setdefault(_layer(s), {}).update((d.name, d.known) for d in s.dims)
    for t in tensors:
        indexed = next((d for d in t.slots[0].dims if f"{{{d.name}}}" in t.name), None)
        layouts = tuple(weight_layout(t.axes, s, indexed, sizes[_layer(s)]) for s in t.slots)
        for index, name in _indexed_names(t, indexed):
            yield StoredTensor(name, t.slots, layouts, index)


def _layer(slot: Slot) -> str:
    """Return the name of the layer that has a weight."""
    return slot.name.rpartition(".")[0]


def _indexed_names(t: Tensor, indexed: Dim | None) -> Iterator[tuple[tuple[Dim, int] | None, str]]:
    """Yield the names of the tensors, each with its index of the dim that has one tensor per index."""
    if indexed is None:
        yield None, t.name
    else:
        names = (t.name.replace(f"{{{indexed.name}}}", str(i)) for i in range(indexed.known))
        yield from (((indexed, i), name) for i, name in enumerate(names))


def weight_layout(
    axes: Axes, slot: Slot, indexed: Dim | None, sizes_of_layer: Mapping[str, int] = MappingProxyType({})
) -> WeightLayout:
    """Return the layout of a weight in a tensor with these axes.

    indexed: a dim that has one tensor per index. sizes_of_layer: sizes of the dims of all weights of the layer.
    """
    dims = [d for d in slot.dims if d != indexed]
    held = {d.name for d in dims}
    named = [p.groups if isinstance(p, GroupsOf) else p for axis in axes for p in axis_parts(axis)]
    rest = [d.name for d in dims if d.name not in named]
    sizes: list[int] = []
    order: list[str] = []
    joined = None
    for axis in axes:
        size = apart = 1  # apart: groups of a dim's indices, which the part before the mark counts
        for part in axis_parts(axis):
            if part is JOIN:
                sizes.append(size)
                joined, size = len(sizes), 1
            elif isinstance(part, GroupsOf) and part.groups not in held:
                apart = size = sizes_of_layer[part.groups]
            elif isinstance(part, GroupsOf):
                order.append(part.groups)
                size *= sizes_of_layer[part.groups]
            elif part != 1:
                group = rest if part is ... else [str(part)]
                order += group
                size *= prod(d.known for d in dims if d.name in group)
        size //= apart
        side = isqrt(size // axis.channels) if isinstance(axis, Square) else 0
        sizes += [axis.channels, side, side] if isinstance(axis, Square) else [size]
    names = [d.name for d in dims]
    assert sorted(order) == sorted(names), f"{slot.name} has dims {names}, which {axes} do not cover"
    return WeightLayout(tuple(d.known for d in dims), tuple(names.index(n) for n in order), tuple(sizes), joined)
