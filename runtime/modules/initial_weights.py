"""Initial values of weights: a pure function of (seed, the weight's name in the model, the copy), whatever the layout.

They are drawn by numpy rather than by a `torch.Generator`, whose CPU seed is only 32 bits wide (two of the 200,000
matrices of a large mixture of experts would likely be equal) and whose normals are computed by other instructions
on other processors. numpy's PCG64 keeps 128 bits of the digest, is as fast, and its normals (ziggurat: a table, a
comparison and a product) are the same bits everywhere.
"""

from __future__ import annotations

from hashlib import sha256
from math import prod

import numpy as np
import torch

from megaloom.dsl import Slot, Weight


def initial_weight(slot: Slot, seed: int, index: int | None = None) -> torch.Tensor:
    """The unsplit float32 values that a weight starts with, of dims `slot.dims`, normal with its mean and std.

    With `index`, one copy alone (dims `slot.value.shape`), drawn without the others; copies are counted through
    `slot.outer` in row-major order. Raises IndexError when there is no such copy.
    """
    copies = prod(d.known for d in slot.outer)
    sizes = [d.known for d in slot.value.shape]
    if index is not None:
        if not 0 <= index < copies:
            raise IndexError(f"{slot.name} has {copies} copies, so none of index {index}")
        return torch.from_numpy(_draw(slot, seed, index, sizes))
    out = np.empty((copies, *sizes), np.float32)
    for i in range(copies):
        out[i] = _draw(slot, seed, i, sizes)
    return torch.from_numpy(out.reshape([d.known for d in slot.dims]))


def _draw(slot: Slot, seed: int, index: int, sizes: list[int]) -> np.ndarray:
    op = slot.value.op
    assert isinstance(op, Weight)
    if op.std == 0:
        return np.full(sizes, op.mean, np.float32)
    digest = sha256(f"{seed} {slot.name} {index}".encode()).digest()
    values = np.random.Generator(np.random.PCG64(int.from_bytes(digest))).standard_normal(sizes, np.float32)
    values *= np.float32(op.std)
    values += np.float32(op.mean)
    return values
