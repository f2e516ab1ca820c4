"""Convert between the weights of a model and the tensors of a Hugging Face checkpoint.

`from_checkpoint` and `to_checkpoint` are inverse. Tensors only need the methods reshape, permute, narrow, select, copy_
and new_empty of torch tensors, so that torch is not imported here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isqrt, prod
from typing import Any

from attrs import frozen

from megaloom.dsl.dims import Dim
from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model
from megaloom.dsl.node import Slot

from .tensor_names import (
    JOIN,
    Axes,
    Names,
    Square,
    Tensor,
    axis_parts,
    checkpoint_tensors,
    first_few,
)


def from_checkpoint(names: Names, model: Model, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of a model by their names in `graph(model).weights`, from the tensors of a checkpoint.

    Raises UserError if a tensor is missing, has another shape, or does not belong to this model.
    """
    out: dict[str, Any] = {}
    used: set[str] = set()
    stored = {names.current(name): name for name in checkpoint}
    for t in checkpoint_tensors(names, model):
        layouts = _layouts(t)
        for index, name in _copies(t):
            if name not in stored:
                raise UserError(
                    f"the checkpoint has no tensor {name!r}, which holds {', '.join(s.name for s in t.slots)}"
                )
            used.add(name)
            parts = _split(name, checkpoint[stored[name]], layouts)
            for slot, part in zip(t.slots, parts, strict=True):
                _put(out, slot, index, part)
    unused = re.compile("|".join(_pattern(u, used) for u in names.unused) or "(?!)")
    left = [name for name in stored if name not in used and not unused.match(name)]
    for name in left:
        first = names.copies.get(name, "")
        x, twin = checkpoint[stored[name]], checkpoint.get(stored.get(first, ""))
        if twin is not None and not _same(x, twin):
            raise UserError(
                f"the checkpoint's {name} differs from its {first}, but model {model.name!r} shares one weight"
            )
        if name in names.zero and bool((x != 0).any()):
            raise UserError(f"the checkpoint's {name} is not zero, but model {model.name!r} has no such weight")
    if unknown := [name for name in left if name not in names.zero and names.copies.get(name) not in stored]:
        raise UserError(f"model {model.name!r} has no weights for the checkpoint's {first_few(unknown)}")
    return out


def _pattern(beginning: str, used: set[str]) -> str:
    """Return a regular expression for names with a prefix; {beyond} matches the number of an unused layer."""
    before, mark, after = map(re.escape, beginning.partition("{beyond}"))
    if not mark:
        return before.replace(r"\{layer\}", r"\d+")
    numbers = {m[1] for name in used if (m := re.match(rf"{before}(\d+)\.", name))}
    return rf"{before}(?!(?:{'|'.join(numbers)})\.)\d+{after}"


def _same(x: Any, y: Any) -> bool:
    return tuple(x.shape) == tuple(y.shape) and bool((x == y).all())


def to_checkpoint(names: Names, model: Model, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a checkpoint, from the weights of a model by their names in `graph(model).weights`."""
    out: dict[str, Any] = {}
    for t in checkpoint_tensors(names, model):
        layouts = _layouts(t)
        for index, name in _copies(t):
            out[name] = _join([_at(weights[s.name], s, index) for s in t.slots], layouts)
    return out


@frozen
class _Layout:
    """The order of one weight's dims in a tensor, and the sizes of the tensor's axes.

    An axis with a JOIN mark counts as two: the dims before the mark, and those after it.
    """

    sizes: tuple[int, ...]  # of the weight, in the order of its slot
    order: tuple[int, ...]  # for each dim of the tensor, its index in the slot
    axes: tuple[int, ...]
    joined: int | None  # the index of the axis after the mark


def _layouts(t: Tensor) -> tuple[_Layout, ...]:
    return tuple(_layout(t.axes, s, _indexed(t)) for s in t.slots)


def _layout(axes: Axes, slot: Slot, indexed: Dim | None) -> _Layout:
    dims = [d for d in slot.dims if d != indexed]
    named = [part for axis in axes for part in axis_parts(axis)]
    rest = [d.name for d in dims if d.name not in named]
    sizes: list[int] = []
    order: list[str] = []
    joined = None
    for axis in axes:
        size = 1
        for part in axis_parts(axis):
            if part is JOIN:
                sizes.append(size)
                joined, size = len(sizes), 1
            elif part != 1:
                group = rest if part is ... else [str(part)]
                order += group
                size *= prod(d.known for d in dims if d.name in group)
        side = isqrt(size // axis.channels) if isinstance(axis, Square) else 0
        sizes += [axis.channels, side, side] if isinstance(axis, Square) else [size]
    names = [d.name for d in dims]
    assert sorted(order) == sorted(names), f"{slot.name} has dims {names}, which {axes} do not cover"
    return _Layout(tuple(d.known for d in dims), tuple(names.index(n) for n in order), tuple(sizes), joined)


def _shape(layouts: tuple[_Layout, ...]) -> tuple[int, ...]:
    """Return the sizes of the tensor that holds these weights."""
    first, at = layouts[0], layouts[0].joined
    if at is None:
        return first.axes
    return (*first.axes[: at - 1], first.axes[at - 1] * sum(x.axes[at] for x in layouts), *first.axes[at + 1 :])


def _split(name: str, tensor: Any, layouts: tuple[_Layout, ...]) -> Iterator[Any]:
    """Yield the weights that a tensor holds."""
    if tuple(tensor.shape) != (want := _shape(layouts)):
        raise UserError(f"the checkpoint's {name} has shape {list(tensor.shape)}, this model needs {list(want)}")
    start = 0
    for x in layouts:
        part = tensor
        if (at := x.joined) is not None:
            whole = sum(y.axes[at] for y in layouts)
            part = tensor.reshape((*x.axes[:at], whole, *x.axes[at + 1 :])).narrow(at, start, x.axes[at])
            start += x.axes[at]
        permuted = part.reshape(tuple(x.sizes[i] for i in x.order))
        yield permuted.permute(tuple(x.order.index(i) for i in range(len(x.order))))


def _join(weights: list[Any], layouts: tuple[_Layout, ...]) -> Any:
    """Return the tensor that holds these weights."""
    parts = [w.permute(x.order).reshape(x.axes) for w, x in zip(weights, layouts, strict=True)]
    if (at := layouts[0].joined) is None:
        return parts[0]
    whole = sum(x.axes[at] for x in layouts)
    out = parts[0].new_empty((*layouts[0].axes[:at], whole, *layouts[0].axes[at + 1 :]))
    start = 0
    for part in parts:
        out.narrow(at, start, part.shape[at]).copy_(part)
        start += part.shape[at]
    return out.reshape(_shape(layouts))


def _indexed(t: Tensor) -> Dim | None:
    """Return the dim that has one tensor per index, if there is one."""
    return next((d for d in t.slots[0].dims if f"{{{d.name}}}" in t.name), None)


def _copies(t: Tensor) -> Iterator[tuple[tuple[Dim, int] | None, str]]:
    """Yield the names of the tensors, each with its index of that dim."""
    d = _indexed(t)
    if d is None:
        yield None, t.name
    else:
        yield from (((d, i), t.name.replace(f"{{{d.name}}}", str(i))) for i in range(d.known))


def _at(weight: Any, slot: Slot, index: tuple[Dim, int] | None) -> Any:
    return weight if index is None else weight.select(slot.dims.index(index[0]), index[1])


def _put(out: dict[str, Any], slot: Slot, index: tuple[Dim, int] | None, part: Any) -> None:
    """Set a weight, or one index of it."""
    if index is None:
        out[slot.name] = part
        return
    if slot.name not in out:
        out[slot.name] = part.new_empty(tuple(d.known for d in slot.dims))
    _at(out[slot.name], slot, index).copy_(part)
