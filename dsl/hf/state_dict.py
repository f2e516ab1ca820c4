"""Weights taken from the tensors of a Hugging Face checkpoint, and given to one, by their names (see `names`).

Protocol: `take` and `give` undo each other. Tensors need only methods that torch's have (reshape, permute, narrow,
select, copy_, new_empty), so that nothing is imported for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import isqrt, prod
from typing import Any

from attrs import frozen

from megaloom.dsl.dims import Dim
from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model, Slot

from .tensor_names import (
    JOIN,
    Axes,
    Names,
    Square,
    Tensor,
    parts,
    some,
    tensors,
)


def take(names: Names, model: Model, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a model, by the names of `graph(model).weights`, from the tensors of a checkpoint.

    Raises UserError when a tensor is missing, of another shape, or not of this model.
    """
    out: dict[str, Any] = {}
    used: set[str] = set()
    called = {names.now(name): name for name in checkpoint}
    for t in tensors(names, model):
        layouts = _layouts(t)
        for index, name in _copies(t):
            if name not in called:
                raise UserError(f"the checkpoint has no tensor {name!r} for {', '.join(s.name for s in t.slots)}")
            used.add(name)
            parts = _split(name, checkpoint[called[name]], layouts)
            for slot, part in zip(t.slots, parts, strict=True):
                _put(out, slot, index, part)
    unused = re.compile("|".join(_pattern(u, used) for u in names.unused) or "(?!)")
    left = [name for name in called if name not in used and not unused.match(name)]
    for name in left:
        first = names.copies.get(name, "")
        x, twin = checkpoint[called[name]], checkpoint.get(called.get(first, ""))
        if twin is not None and not _same(x, twin):
            raise UserError(f"the checkpoint's {name} is not its {first}, and model {model.name!r} has one for both")
        if name in names.zero and bool((x != 0).any()):
            raise UserError(f"the checkpoint's {name} is not zero, and model {model.name!r} has nothing like it")
    if unknown := [name for name in left if name not in names.zero and names.copies.get(name) not in called]:
        raise UserError(f"model {model.name!r} has no weights for the checkpoint's {some(unknown)}")
    return out


def _pattern(beginning: str, used: set[str]) -> str:
    """Matches names that begin so; {beyond} the number of no layer that is used."""
    before, mark, after = map(re.escape, beginning.partition("{beyond}"))
    if not mark:
        return before.replace(r"\{layer\}", r"\d+")
    numbers = {m[1] for name in used if (m := re.match(rf"{before}(\d+)\.", name))}
    return rf"{before}(?!(?:{'|'.join(numbers)})\.)\d+{after}"


def _same(x: Any, y: Any) -> bool:
    return tuple(x.shape) == tuple(y.shape) and bool((x == y).all())


def give(names: Names, model: Model, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a checkpoint from the weights of a model, by the names of `graph(model).weights`."""
    out: dict[str, Any] = {}
    for t in tensors(names, model):
        layouts = _layouts(t)
        for index, name in _copies(t):
            out[name] = _join([_at(weights[s.name], s, index) for s in t.slots], layouts)
    return out


@frozen
class _Layout:
    """How one weight lies in a tensor: its dims in the tensor's order, 1s among them, and the sizes of the axes.

    Where weights are joined, that axis is two: the dims before the mark, and those after it.
    """

    sizes: tuple[int, ...]  # of the weight, as its slot has them
    order: tuple[int, ...]  # the place in the slot of each dim of the tensor
    axes: tuple[int, ...]
    joined: int | None  # which of the axes follows the mark


def _layouts(t: Tensor) -> tuple[_Layout, ...]:
    return tuple(_layout(t.axes, s, _indexed(t)) for s in t.slots)


def _layout(axes: Axes, slot: Slot, indexed: Dim | None) -> _Layout:
    dims = [d for d in slot.dims if d != indexed]
    said = [part for axis in axes for part in parts(axis)]
    rest = [d.name for d in dims if d.name not in said]
    sizes: list[int] = []
    order: list[str] = []
    joined = None
    for axis in axes:
        size = 1
        for part in parts(axis):
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
    assert sorted(order) == sorted(names), f"{slot.name} {names} is no {axes}"
    return _Layout(tuple(d.known for d in dims), tuple(names.index(n) for n in order), tuple(sizes), joined)


def _shape(layouts: tuple[_Layout, ...]) -> tuple[int, ...]:
    """The sizes of the tensor that holds these weights."""
    first, at = layouts[0], layouts[0].joined
    if at is None:
        return first.axes
    return (*first.axes[: at - 1], first.axes[at - 1] * sum(x.axes[at] for x in layouts), *first.axes[at + 1 :])


def _split(name: str, tensor: Any, layouts: tuple[_Layout, ...]) -> Iterator[Any]:
    """The weights that a tensor holds."""
    if tuple(tensor.shape) != (want := _shape(layouts)):
        raise UserError(f"the checkpoint's {name} is {list(tensor.shape)}, and this model's is {list(want)}")
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
    """The tensor that holds these weights."""
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
    """The dim of which each index has a tensor of its own."""
    return next((d for d in t.slots[0].dims if f"{{{d.name}}}" in t.name), None)


def _copies(t: Tensor) -> Iterator[tuple[tuple[Dim, int] | None, str]]:
    """The names of the tensors, each with the index that it is of."""
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
