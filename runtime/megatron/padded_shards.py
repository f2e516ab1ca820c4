"""Padded parameters. A checkpoint holds a parameter without its padding, which the layout decides.

A padded parameter has an attribute `pad_dim`, the dim that is padded.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mark_padded(p: Tensor, dim: int) -> None:
    """Note on a parameter which dim is padded."""
    p.pad_dim = dim  # type: ignore[attr-defined]


def with_padding(x: Tensor, dim: int, size: int) -> Tensor:
    """Return a tensor with zeros behind it along a dim, which then has this size."""
    if x.shape[dim] == size:
        return x
    return torch.cat([x, x.new_zeros([size - n if i == dim else n for i, n in enumerate(x.shape)])], dim)
