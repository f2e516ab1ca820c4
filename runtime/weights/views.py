"""Tensors that are read slice by slice: a view is a rearrangement of stored tensors, and nothing is read to make one.

A view has the methods of torch tensors that rearrange: permute, reshape, narrow, select, flatten, unflatten, chunk, T;
`torch.cat` and `torch.stack` accept views. `read` returns the values, and reads from the stored tensors only the boxes
that they lie in. So one description of a rearrangement serves full tensors and shards of files too large for a host.

A rearrangement is inverted by `solve`: it returns what the stored tensors are, if a view has given values. If a view
leaves out elements of the stored tensors, `stored_boxes` returns the boxes of them that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate, product
from math import prod
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

Box = tuple[range, ...]
"""A part of a tensor: for each dim a range of indices, of step 1."""


@frozen(eq=False)
class View:
    """A tensor of given sizes and type whose values are not read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, box: Box | None = None) -> Tensor:
        """Return the values, or those of a part."""
        box = tuple(map(range, self.shape)) if box is None else box
        return self._read(box) if all(map(len, box)) else torch.empty([len(r) for r in box], dtype=self.dtype)

    def _read(self, box: Box) -> Tensor:
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """Return the number of dims."""
        return len(self.shape)

    @property
    def T(self) -> View:  # noqa: N802 (torch's name)
        """Return the view with its dims in reverse order."""
        return self.permute(*reversed(range(self.ndim)))

    def permute(self, *dims: Any) -> View:
        """Return the view with its dims in another order, given one by one or as a tuple."""
        order: tuple[int, ...] = tuple(dims[0]) if len(dims) == 1 and not isinstance(dims[0], int) else dims
        return Permuted(tuple(self.shape[i] for i in order), self.dtype, self, order)

    def reshape(self, *sizes: Any) -> View:
        """Return the view with other sizes, given one by one or as a tuple; one of them may be -1."""
        shape = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
        known = prod(n for n in shape if n != -1)
        shape = tuple(prod(self.shape) // known if n == -1 else n for n in shape)
        if prod(shape) != prod(self.shape):
            raise ValueError(f"a tensor of sizes {list(self.shape)} cannot have the sizes {list(shape)}")
        return self if shape == self.shape else Reshaped(shape, self.dtype, self)

    def narrow(self, dim: int, start: int, length: int) -> View:
        """Return `length` indices of a dim, from `start` on."""
        dim %= self.ndim
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise IndexError(f"{start} to {start + length} is out of range in dim {dim} of {list(self.shape)}")
        if length == self.shape[dim]:
            return self
        return Narrowed((*self.shape[:dim], length, *self.shape[dim + 1 :]), self.dtype, self, dim, start)

    def select(self, dim: int, index: int) -> View:
        """Return the view at one index of a dim; the result lacks that dim."""
        dim %= self.ndim
        return self.narrow(dim, index, 1).reshape((*self.shape[:dim], *self.shape[dim + 1 :]))

    def unsqueeze(self, dim: int) -> View:
        """Return the view with a dim of size 1 before this dim."""
        dim %= self.ndim + 1
        return self.reshape((*self.shape[:dim], 1, *self.shape[dim:]))

    def flatten(self, start: int = 0, end: int = -1) -> View:
        """Return the view with the dims from `start` to `end` merged."""
        start, end = start % self.ndim, end % self.ndim
        return self.reshape((*self.shape[:start], prod(self.shape[start : end + 1]), *self.shape[end + 1 :]))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> View:
        """Return the view with a dim split into several; one size may be -1."""
        dim %= self.ndim
        known = prod(n for n in sizes if n != -1)
        split = (self.shape[dim] // known if n == -1 else n for n in sizes)
        return self.reshape((*self.shape[:dim], *split, *self.shape[dim + 1 :]))

    def chunk(self, count: int, dim: int = 0) -> tuple[View, ...]:
        """Return `count` equal parts along a dim, which `count` divides."""
        length, rest = divmod(self.shape[dim], count)
        if rest:
            raise ValueError(f"{count} does not divide dim {dim} of {list(self.shape)}")
        return tuple(self.narrow(dim, i * length, length) for i in range(count))

    def new_zeros(self, *sizes: Any) -> View:
        """Return a view of zeros of this type."""
        shape = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
        return source(shape, self.dtype, lambda box: torch.zeros([len(r) for r in box], dtype=self.dtype))

    def __getitem__(self, key: Any) -> View:
        """Return the view at an index, or with a new dim for each None; `:` keeps a dim."""
        keys = key if isinstance(key, tuple) else (key,)
        out, dim = self, 0
        for k in keys:
            if k is None:
                out = out.unsqueeze(dim)
            elif isinstance(k, int):
                out, dim = out.select(dim, k % out.shape[dim]), dim - 1
            elif k != slice(None):
                raise TypeError(f"a view cannot be indexed by {k!r}")
            dim += 1
        return out

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Concatenate or stack views; other functions of torch are not rearrangements."""
        options = kwargs or {}
        if function is torch.cat:
            return concatenated(*args, **options)
        if function is torch.stack:
            parts, dim = args[0], options.get("dim", args[1] if len(args) > 1 else 0)
            return concatenated([x.unsqueeze(dim) for x in parts], dim)
        return NotImplemented


@frozen(eq=False)
class StoredView(View):
    """A stored tensor, with a function that reads a part of it. `key` names it in the result of `solve`."""

    reader: Callable[[Box], Tensor]
    key: Hashable = None

    def _read(self, box: Box) -> Tensor:
        return self.reader(box)


@frozen(eq=False)
class Permuted(View):
    """A view with its dims in another order: dim i is dim order[i] of `of`."""

    of: View
    order: tuple[int, ...]

    def _read(self, box: Box) -> Tensor:
        return self.of.read(tuple(box[self.order.index(i)] for i in range(len(box)))).permute(self.order)


@frozen(eq=False)
class Narrowed(View):
    """The indices of a dim from `start` on."""

    of: View
    dim: int
    start: int

    def _read(self, box: Box) -> Tensor:
        moved = _shifted(box[self.dim], self.start)
        return self.of.read((*box[: self.dim], moved, *box[self.dim + 1 :]))


@frozen(eq=False)
class Concatenated(View):
    """Views one after the other along a dim."""

    parts: tuple[View, ...]
    dim: int

    def _read(self, box: Box) -> Tensor:
        out: Tensor | None = None
        here, at = box[self.dim], 0
        for start, part in self.starts():
            own = range(max(here.start, start), min(here.stop, start + part.shape[self.dim]))
            if len(own):
                values = part.read((*box[: self.dim], _shifted(own, -start), *box[self.dim + 1 :]))
                out = values.new_empty([len(r) for r in box], dtype=self.dtype) if out is None else out
                out.narrow(self.dim, at, len(own)).copy_(values)
                at += len(own)
        return torch.empty([len(r) for r in box], dtype=self.dtype) if out is None else out

    def starts(self) -> Iterator[tuple[int, View]]:
        """Yield each part with its first index in the dim."""
        sizes = [part.shape[self.dim] for part in self.parts]
        return zip(accumulate(sizes, initial=0), self.parts, strict=False)


@frozen(eq=False)
class Reshaped(View):
    """A view with its dims split and merged.

    Dims that are split or merged together form a group. For each group, a box of the new dims lies in a range of flat
    indices. The smallest box of the old dims that has this range is read, and the new box taken from it.
    """

    of: View

    def _read(self, box: Box) -> Tensor:
        old_box: list[range] = []
        strides: list[int] = []  # of the new dims, in flat indices of their group
        groups: list[tuple[int, int, int]] = []  # new dims, flat indices read, the first index of the new box
        at = 0
        for old, new in _groups(self.of.shape, self.shape):
            here, own = box[at : at + len(new)], _strides(new)
            at += len(new)
            first = sum(r.start * s for r, s in zip(here, own, strict=True))
            last = sum((r.stop - 1) * s for r, s in zip(here, own, strict=True))
            covering = _covering_box(old, first, last)
            begin = sum(r.start * s for r, s in zip(covering, _strides(old), strict=True))
            old_box += covering
            strides += own
            groups.append((len(new), prod(map(len, covering)), first - begin))
        flat = self.of.read(tuple(old_box)).reshape([count for _, count, _ in groups]).contiguous()
        outer = [s for (n, *_), s in zip(groups, flat.stride(), strict=True) for _ in range(n)]
        steps = [a * b for a, b in zip(outer, strides, strict=True)]
        offset = sum(skip * s for (*_, skip), s in zip(groups, flat.stride(), strict=True))
        return flat.as_strided([len(r) for r in box], steps, flat.storage_offset() + offset)


def source(shape: Sequence[int], dtype: torch.dtype, reader: Callable[[Box], Tensor], key: Hashable = None) -> View:
    """Return a view of a stored tensor, of which `reader` reads a part."""
    return StoredView(tuple(shape), dtype, reader, key)


def symbol(shape: Sequence[int], key: Hashable) -> View:
    """Return a view that stands for a stored tensor: it is rearranged, and never read."""
    return source(shape, torch.float32, _unread, key)


def _unread(box: Box) -> Tensor:
    raise AssertionError("a tensor that stands for itself has no values")


def held(x: Tensor, key: Hashable = None) -> View:
    """Return a view of a tensor in memory."""
    return source(x.shape, x.dtype, lambda box: x[tuple(slice(r.start, r.stop) for r in box)], key)


def concatenated(parts: Sequence[View], dim: int = 0) -> View:
    """Return views one after the other along a dim."""
    first, *others = parts
    dim %= first.ndim
    if any(x.shape[:dim] + x.shape[dim + 1 :] != first.shape[:dim] + first.shape[dim + 1 :] for x in others):
        raise ValueError(f"sizes {[list(x.shape) for x in parts]} cannot be concatenated along dim {dim}")
    if not others:
        return first
    size = sum(x.shape[dim] for x in parts)
    dtype = first.dtype
    for x in others:
        dtype = torch.promote_types(dtype, x.dtype)
    return Concatenated((*first.shape[:dim], size, *first.shape[dim + 1 :]), dtype, tuple(parts), dim)


def values_of(x: View | Tensor) -> Tensor:
    """Return the values of a view; a tensor as it is."""
    return x.read() if isinstance(x, View) else x


def solve(view: View, value: View) -> dict[Hashable, View]:
    """Return the stored tensors by their keys, if `view`, a rearrangement of all their elements, has this value."""
    match view:
        case StoredView():
            return {view.key: value}
        case Permuted():
            return solve(view.of, value.permute(tuple(view.order.index(i) for i in range(view.ndim))))
        case Reshaped():
            return solve(view.of, value.reshape(view.of.shape))
        case Concatenated():
            parts = (solve(x, value.narrow(view.dim, start, x.shape[view.dim])) for start, x in view.starts())
            return {key: part for found in parts for key, part in found.items()}
    raise TypeError(f"{type(view).__name__} of a stored tensor leaves elements out: it has no inverse")


def with_readers(view: View, readers: Callable[[Hashable], Callable[[Box], Tensor]]) -> View:
    """Return a rearrangement of stored tensors that have other values: `readers` returns by key what reads them."""
    match view:
        case StoredView():
            return view if view.key is None else evolve(view, reader=readers(view.key))
        case Concatenated():
            return evolve(view, parts=tuple(with_readers(part, readers) for part in view.parts))
        case Permuted() | Narrowed() | Reshaped():
            return evolve(view, of=with_readers(view.of, readers))
    raise TypeError(f"{type(view).__name__} is no rearrangement of stored tensors")


def boxes_reader(boxes: Sequence[tuple[Box, Callable[[], Tensor]]], dtype: torch.dtype) -> Callable[[Box], Tensor]:
    """Return what reads a tensor of which some boxes are there, each with a function that returns its values.

    Elements that lie in none of the boxes are undefined. What is one of the boxes is not copied.
    """

    def read(box: Box) -> Tensor:
        if (same := next((values for whole, values in boxes if whole == box), None)) is not None:
            return same().to(dtype)
        out = torch.empty([len(r) for r in box], dtype=dtype)
        for whole, values in boxes:
            common = [range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(box, whole, strict=True)]
            if all(map(len, common)):
                out[_inside(common, box)] = values()[_inside(common, whole)].to(dtype)
        return out

    return read


def _inside(part: Sequence[range], of: Sequence[range]) -> tuple[slice, ...]:
    """Return the indices of a part of a box, counted from the begin of the box."""
    return tuple(slice(r.start - o.start, r.stop - o.start) for r, o in zip(part, of, strict=True))


def stored_boxes(view: View, value: Tensor, box: Box | None = None) -> Iterator[tuple[Hashable, Box, Tensor]]:
    """Yield the boxes of stored tensors that a view, or a box of it, consists of: key, box and its values.

    value: the values of the box of the view. Tensors without a key are left out: they are zeros that pad a view.
    """
    box = tuple(map(range, view.shape)) if box is None else box
    if not all(map(len, box)):
        return
    match view:
        case StoredView():
            if view.key is not None:
                yield view.key, box, value
        case Permuted():
            inverse = [view.order.index(i) for i in range(view.ndim)]
            yield from stored_boxes(view.of, value.permute(inverse), tuple(box[i] for i in inverse))
        case Narrowed():
            moved = _shifted(box[view.dim], view.start)
            yield from stored_boxes(view.of, value, (*box[: view.dim], moved, *box[view.dim + 1 :]))
        case Concatenated():
            here = box[view.dim]
            for start, part in view.starts():
                own = range(max(here.start, start), min(here.stop, start + part.shape[view.dim]))
                if len(own):
                    inside = (*box[: view.dim], _shifted(own, -start), *box[view.dim + 1 :])
                    yield from stored_boxes(part, value.narrow(view.dim, own.start - here.start, len(own)), inside)
        case Reshaped():
            for inner, part in _reshaped_boxes(view, value, box):
                yield from stored_boxes(view.of, part, inner)
        case _:
            raise TypeError(f"{type(view).__name__} is no rearrangement of stored tensors")


def _reshaped_boxes(view: Reshaped, value: Tensor, box: Box) -> Iterator[tuple[Box, Tensor]]:
    """Yield the boxes of `view.of` that make a box of a view, with their values."""
    if box == tuple(map(range, view.shape)):
        yield tuple(map(range, view.of.shape)), value.reshape(view.of.shape)
        return
    choices: list[list[tuple[list[int], range, Box]]] = []  # for each group of dims, its pieces
    at = 0
    for old, new in _groups(view.of.shape, view.shape):
        choices.append(list(_pieces(old, new, box[at : at + len(new)])))
        at += len(new)
    for pieces in product(*choices):
        part = value[tuple(slice(i, i + 1) if i >= 0 else slice(None) for index, *_ in pieces for i in index)]
        sizes, at = [], 0
        for index, *_ in pieces:
            sizes.append(prod(part.shape[at : at + len(index)]))
            at += len(index)
        part = part.reshape(sizes)
        for dim, (_, flat, _) in enumerate(pieces):
            part = part.narrow(dim, flat.start, len(flat))
        inner = tuple(r for *_, boxes in pieces for r in boxes)
        yield inner, part.reshape([len(r) for r in inner])


def _pieces(old: Sequence[int], new: Sequence[int], box: Box) -> Iterator[tuple[list[int], range, Box]]:
    """Yield the pieces of a box of new dims that are boxes of the old dims of a group.

    A piece is an index for each new dim, within the box, or -1 for all indices; the range that it is of their flat
    indices; and its box of the old dims.
    """
    strides = _strides(new)
    whole = [len(r) == n for r, n in zip(box, new, strict=True)]
    inner = next((i for i in range(len(new)) if all(whole[i + 1 :])), 0)  # indices from this dim on are contiguous
    for index in product(*(range(len(r)) for r in box[:inner])):
        first = sum((r.start + i) * s for r, i, s in zip(box, index, strides, strict=False))
        count = prod(map(len, box[inner:]))
        if inner < len(new):
            first += box[inner].start * strides[inner]
        at = first
        for part in _flat_boxes(old, first, first + count):
            length = prod(map(len, part))
            yield [*index, *[-1] * (len(new) - inner)], range(at - first, at - first + length), part
            at += length


def _flat_boxes(sizes: Sequence[int], first: int, stop: int) -> Iterator[Box]:
    """Yield boxes that together are a range of flat indices, in its order."""
    if not sizes:
        yield ()
        return
    inner, rest = prod(sizes[1:]), tuple(sizes[1:])
    while first < stop:
        row, inside = divmod(first, inner)
        rows = (stop - first) // inner if not inside else 0
        if rows:
            yield (range(row, row + rows), *map(range, rest))
            first += rows * inner
        else:
            end = min(stop, (row + 1) * inner)
            for box in _flat_boxes(rest, inside, end - row * inner):
                yield (range(row, row + 1), *box)
            first = end


def _shifted(r: range, by: int) -> range:
    return range(r.start + by, r.stop + by)


def _strides(sizes: Sequence[int]) -> list[int]:
    """Return the flat distance between neighbours along each dim."""
    return [prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yield the shortest runs of old and new dims that have equal products. Together they are all dims."""
    i = j = 0
    while i < len(old) or j < len(new):
        end_i, end_j = i + 1, j + 1
        while prod(old[i:end_i]) != prod(new[j:end_j]):
            grow_old = prod(old[i:end_i]) < prod(new[j:end_j])
            end_i, end_j = end_i + grow_old, end_j + (not grow_old)
        if end_i >= len(old) or end_j >= len(new):  # dims of size 1 at the end belong to the last group
            end_i, end_j = len(old), len(new)
        yield old[i:end_i], new[j:end_j]
        i, j = end_i, end_j


def _covering_box(sizes: Sequence[int], first: int, last: int) -> list[range]:
    """Return the smallest box of contiguous flat indices that has the flat indices `first` and `last`."""
    out: list[range] = []
    for size, stride in zip(sizes, _strides(sizes), strict=True):
        several = any(len(r) > 1 for r in out)
        out.append(range(size) if several else range(first // stride, last // stride + 1))
        first, last = first % stride, last % stride
    return out
