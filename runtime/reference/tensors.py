"""Tensors by the names of their dims."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters

import torch
from torch import Tensor

from megaloom.dsl import Shape


def names(shape: Shape) -> list[str]:
    """The names of a shape's dims."""
    return [d.name for d in shape]


def axis(shape: Shape, name: str) -> int:
    """The place of a dim."""
    return names(shape).index(name)


def broadcast(x: Tensor, have: Shape | Sequence[str], want: Shape | Sequence[str]) -> Tensor:
    """x with its dims in the order wanted, and a dim of size 1 for each that it lacks."""
    given, wanted = (names(s) if isinstance(s, Shape) else s for s in (have, want))
    x = x.permute([given.index(name) for name in wanted if name in given])
    return x[tuple(slice(None) if name in given else None for name in wanted)]


def einsum(x: Tensor, xs: list[str], y: Tensor, ys: list[str], out: list[str]) -> Tensor:
    """torch.einsum by names of dims instead of letters."""
    letters = dict(zip(dict.fromkeys((*xs, *ys)), ascii_letters, strict=False))
    left, right, result = ("".join(letters[name] for name in names) for names in (xs, ys, out))
    return torch.einsum(f"{left},{right}->{result}", x, y)
