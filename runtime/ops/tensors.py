"""Operations on tensors by the names of their dims. How dims are moved is found once for each order of names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from string import ascii_letters

import torch
from torch import Tensor

from megaloom.dsl import Shape

Names = tuple[str, ...]


def names(shape: Shape) -> list[str]:
    """Return the names of a shape's dims."""
    return list(shape.names)


def dim_index(shape: Shape, name: str) -> int:
    """Return the index of the dim of this name."""
    return shape.names.index(name)


def broadcast(x: Tensor, have: Shape | Sequence[str], want: Shape | Sequence[str]) -> Tensor:
    """Return x with its dims `have` in the order `want`, and size 1 for each dim that x lacks."""
    given = have.names if isinstance(have, Shape) else tuple(have)
    wanted = want.names if isinstance(want, Shape) else tuple(want)
    if given == wanted:
        return x  # a view would be one more node of autograd
    order, added = _moves(given, wanted)
    x = x if order is None else x.permute(order)
    for i in added:
        x = x.unsqueeze(i)
    return x


def document_positions(documents: Tensor, along: int = -1) -> Tensor:
    """Return the position of each token in its document, from 0, of document indices along a dim."""
    shape = [1] * documents.dim()
    shape[along] = -1
    position = torch.arange(documents.shape[along], device=documents.device).view(shape)
    starts = documents != documents.roll(1, along)  # the maximum begins with position 0 in any case
    return position - (position * starts).cummax(along).values


@lru_cache(maxsize=1 << 12)
def _moves(given: Names, wanted: Names) -> tuple[list[int] | None, list[int]]:
    """Return how `broadcast` permutes dims, None if not at all, and the indices of the dims that it adds."""
    order = [given.index(name) for name in wanted if name in given]
    return None if order == sorted(order) else order, [i for i, name in enumerate(wanted) if name not in given]


def product(x: Tensor, x_dims: Sequence[str], y: Tensor, y_dims: Sequence[str], out: Sequence[str]) -> Tensor:
    """Return the sum over the dims that are not in `out` of x times y.

    The usual product with a weight is a matmul: it has fewer views for autograd than an einsum. Where only one of the
    two has 32 bits, such as a sum, the product has them too.
    """
    if x.dtype is not y.dtype:
        dtype = torch.promote_types(x.dtype, y.dtype)
        x, y = x.to(dtype), y.to(dtype)
    k = _matmul_dims(tuple(x_dims), tuple(y_dims), tuple(out))
    if k == 0:
        return einsum(x, x_dims, y, y_dims, out)
    sizes = y.shape[k:]
    if k > 1:
        x, y = x.flatten(-k), y.flatten(0, k - 1)
    return x @ y if len(sizes) == 1 else (x @ y.flatten(1)).unflatten(-1, sizes)


@lru_cache(maxsize=1 << 12)
def _matmul_dims(x_dims: Names, y_dims: Names, out: Names) -> int:
    """Return the number of dims over which a matmul sums: the last ones of x, the first ones of y; 0 if none fits."""
    summed = tuple(name for name in x_dims if name not in out)
    k = len(summed)
    kept = y_dims[k:]
    fits = k and kept and x_dims[-k:] == summed == y_dims[:k] and out == (*x_dims[:-k], *kept)
    return k if fits and not set(kept) & set(x_dims) else 0


def einsum(x: Tensor, x_dims: Sequence[str], y: Tensor, y_dims: Sequence[str], out: Sequence[str]) -> Tensor:
    """Return torch.einsum of x and y, with names of dims instead of letters."""
    return torch.einsum(_equation(tuple(x_dims), tuple(y_dims), tuple(out)), x, y)


@lru_cache(maxsize=1 << 12)
def _equation(x_dims: Names, y_dims: Names, out: Names) -> str:
    letters = dict(zip(dict.fromkeys((*x_dims, *y_dims)), ascii_letters, strict=False))
    left, right, result = ("".join(letters[name] for name in dims) for dims in (x_dims, y_dims, out))
    return f"{left},{right}->{result}"
