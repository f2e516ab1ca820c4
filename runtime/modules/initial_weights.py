"""Initial weights: a pure function of seed, weight name and copy index, or given by name. No layout changes them.

numpy draws them, not a `torch.Generator`. torch's CPU seed has only 32 bits, so two of the 200,000 matrices of a large
mixture of experts would likely be equal, and its normals depend on the processor's instructions. numpy's PCG64 uses 128
bits of the digest, is as fast, and its normals (ziggurat method) are the same bits on every machine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import sha256
from math import prod, sqrt

import numpy as np
import torch

from megaloom.dsl import Graph, Model, Shape, Slot, UserError, Weight, graph
from megaloom.runtime.weights.views import View

GivenValues = Mapping[str, torch.Tensor] | Mapping[str, View]
"""Values of weights by the names of `graph(model).weights`: in memory, or views that are read shard by shard."""


def initial_weight(slot: Slot, seed: int, index: int | None = None) -> torch.Tensor:
    """Return the full initial float32 values of a weight, of dims `slot.dims`, with its mean, std and distribution.

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


def given_weight(slot: Slot, weights: GivenValues, index: int | None = None) -> torch.Tensor | View:
    """Return a weight, or one copy of it, from values by the names of `graph(model).weights`."""
    full = weights[slot.name]
    if index is None:
        return full
    return full.reshape(-1, *(d.known for d in slot.value.shape))[index]


def adapters_of(model: Model) -> frozenset[str]:
    """Return the names of the weights of adapters that were added to a model."""
    return frozenset() if model.base is None else frozenset(graph(model).weights.keys() - graph(model.base).weights)


def check_weights(graph: Graph, weights: GivenValues, drawn: Collection[str] = ()) -> None:
    """Raise UserError unless `weights` has each weight of a model, in its shape, and nothing else.

    drawn: names of weights that may be missing: they get random values.
    """
    for name, slot in graph.weights.items():
        if name not in weights and name in drawn:
            continue
        if name not in weights:
            given = ", ".join(weights) or "none"
            raise UserError(f"no weight {name!r} {Shape(slot.dims)}; the names given are {given}")
        sizes, expected = list(weights[name].shape), [d.known for d in slot.dims]
        if sizes != expected:
            raise UserError(f"weight {name!r} has shape {Shape(slot.dims)}, but the tensor given has sizes {sizes}")
    if unknown := [name for name in weights if name not in graph.weights]:
        raise UserError(f"model {graph.name!r} has no weight {unknown[0]!r}")


def _draw(slot: Slot, seed: int, index: int, sizes: list[int]) -> np.ndarray:
    op = slot.value.op
    assert isinstance(op, Weight)
    if slot.std == 0:
        return np.full(sizes, op.mean, np.float32)
    digest = sha256(f"{seed} {slot.name} {index}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest)))
    if op.uniform:  # between -1 and 1 the standard deviation is 1/sqrt(3)
        values = (2 * generator.random(sizes, np.float32) - 1) * np.float32(sqrt(3))
    else:
        values = generator.standard_normal(sizes, np.float32)
    values *= np.float32(slot.std)
    values += np.float32(op.mean)
    return values
