"""Initial weights: a pure function of seed, weight name and copy index. They do not depend on the layout.

numpy draws them, not a `torch.Generator`. torch's CPU seed has only 32 bits, so two of the 200,000 matrices of a large
mixture of experts would likely be equal, and its normals depend on the processor's instructions. numpy's PCG64 uses 128
bits of the digest, is as fast, and its normals (ziggurat method) are the same bits on every machine.
"""

from __future__ import annotations

from hashlib import sha256
from math import prod

import numpy as np
import torch

from megaloom.dsl import Slot, Weight


def initial_weight(slot: Slot, seed: int, index: int | None = None) -> torch.Tensor:
    """Return the full initial float32 values of a weight, of dims `slot.dims`: normal with its mean and std.

    With `index`, return one copy only, of dims `slot.value.shape`, without drawing the others. Copies are counted over
    `slot.outer` in row-major order. Raise IndexError if there is no such copy.
    """
    copies = prod(d.known for d in slot.outer)
    sizes = [d.known for d in slot.value.shape]
    if index is not None:
        if not 0 <= index < copies:
            raise IndexError(f"{slot.name} has {copies} copies; index {index} is out of range")
        return torch.from_numpy(_draw(slot, seed, index, sizes))
    out = np.empty((copies, *sizes), np.float32)
    for i in range(copies):
        out[i] = _draw(slot, seed, i, sizes)
    return torch.from_numpy(out.reshape([d.known for d in slot.dims]))


def _draw(slot: Slot, seed: int, index: int, sizes: list[int]) -> np.ndarray:
    op = slot.value.op
    assert isinstance(op, Weight)
    if slot.std == 0:
        return np.full(sizes, op.mean, np.float32)
    digest = sha256(f"{seed} {slot.name} {index}".encode()).digest()
    values = np.random.Generator(np.random.PCG64(int.from_bytes(digest))).standard_normal(sizes, np.float32)
    values *= np.float32(slot.std)
    values += np.float32(op.mean)
    return values
