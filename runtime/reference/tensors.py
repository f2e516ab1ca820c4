"""Operations on tensors by the names of their dims."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters

import torch
from torch import Tensor

from megaloom.dsl import Shape


def names(shape: Shape) -> list[str]:
    """Return the names of a shape's dims."""
    return [d.name for d in shape]


def dim_index(shape: Shape, name: str) -> int:
    """Return the index of the dim of this name."""
    return names(shape).index(name)


def broadcast(x: Tensor, have: Shape | Sequence[str], want: Shape | Sequence[str]) -> Tensor:
    """Return x with its dims `have` in the order `want`, and size 1 for each dim that x lacks."""
    given, wanted = (names(s) if isinstance(s, Shape) else list(s) for s in (have, want))
    if given == wanted:
        return x  # a view would be one more node of autograd
    order = [given.index(name) for name in wanted if name in given]
    x = x if order == sorted(order) else x.permute(order)
    for i, name in enumerate(wanted):
        x = x if name in given else x.unsqueeze(i)
    return x


def product(x: Tensor, x_dims: list[str], y: Tensor, y_dims: list[str], out: list[str]) -> Tensor:
    """Return the sum over the dims that are not in `out` of x times y.

    The usual product with a weight is a matmul: it has fewer views for autograd than an einsum.
    """
    summed = [name for name in x_dims if name not in out]
    k = len(summed)
    kept = y_dims[k:]
    fits = k and kept and x_dims[-k:] == summed == y_dims[:k] and out == [*x_dims[:-k], *kept]
    if not fits or set(kept) & set(x_dims):
        return einsum(x, x_dims, y, y_dims, out)
    z = x.flatten(-k) @ y.flatten(k).flatten(0, k - 1)
    return z if len(kept) == 1 else z.unflatten(-1, y.shape[k:])


def einsum(x: Tensor, x_dims: list[str], y: Tensor, y_dims: list[str], out: list[str]) -> Tensor:
    """Return torch.einsum of x and y, with names of dims instead of letters."""
    letters = dict(zip(dict.fromkeys((*x_dims, *y_dims)), ascii_letters, strict=False))
    left, right, result = ("".join(letters[name] for name in dims) for dims in (x_dims, y_dims, out))
    return torch.einsum(f"{left},{right}->{result}", x, y)
