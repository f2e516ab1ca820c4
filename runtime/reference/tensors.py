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
    given, wanted = (names(s) if isinstance(s, Shape) else s for s in (have, want))
    x = x.permute([given.index(name) for name in wanted if name in given])
    return x[tuple(slice(None) if name in given else None for name in wanted)]


def einsum(x: Tensor, x_dims: list[str], y: Tensor, y_dims: list[str], out: list[str]) -> Tensor:
    """Return torch.einsum of x and y, with names of dims instead of letters."""
    letters = dict(zip(dict.fromkeys((*x_dims, *y_dims)), ascii_letters, strict=False))
    left, right, result = ("".join(letters[name] for name in dims) for dims in (x_dims, y_dims, out))
    return torch.einsum(f"{left},{right}->{result}", x, y)
