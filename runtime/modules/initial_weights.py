"""Initial weights: a pure function of seed, weight name and copy index, or given by name. No layout changes them.

They are views, so a rank makes its shards alone, on its device. torch's own generators do not serve: the one for CPUs
has a seed of 32 bits, so two of the 200,000 matrices of a large mixture of experts would likely be equal, and which
numbers the one for GPUs draws depends on the GPU. Keys of `random_values` have 128 bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import product
from math import prod, sqrt

import torch
from torch import Tensor

from megaloom.dsl import Graph, Model, Shape, Slot, UserError, Weight, graph
from megaloom.runtime.weights.random_values import RandomKey, normal_values, uniform_values
from megaloom.runtime.weights.views import Box, View, source

GivenValues = Mapping[str, torch.Tensor] | Mapping[str, View]
"""Values of weights by the names of `graph(model).weights`: in memory, or views that are read shard by shard."""

HOST = torch.device("cpu")


def initial_weight(slot: Slot, seed: int, device: torch.device = HOST) -> View:
    """Return the initial float32 values of a weight, of dims `slot.dims`, with its mean, std and distribution.

    A part that is read is made on the device, without the others. Each device makes equal bits.
    """
    sizes, outer = tuple(d.known for d in slot.value.shape), [d.known for d in slot.outer]

    def read(box: Box) -> Tensor:
        copies, inside = box[: len(outer)], box[len(outer) :]
        if not outer:
            return _drawn(slot, seed, 0, inside, device)
        out = torch.empty([len(r) for r in box], device=device)
        rows = out.view(-1, *out.shape[len(outer) :])
        for row, index in zip(rows, product(*copies), strict=True):
            row.copy_(_drawn(slot, seed, _flat(index, outer), inside, device))
        return out

    return source((*outer, *sizes), torch.float32, read)


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


def _flat(index: tuple[int, ...], sizes: list[int]) -> int:
    """Return the number of a copy, counted in row-major order."""
    return sum(i * prod(sizes[at + 1 :]) for at, i in enumerate(index))


def _drawn(slot: Slot, seed: int, copy: int, box: Box, device: torch.device) -> Tensor:
    """Return a box of a copy of a weight."""
    op = slot.value.op
    assert isinstance(op, Weight)
    if slot.std == 0:
        return torch.full([len(r) for r in box], op.mean, dtype=torch.float32, device=device)
    key, sizes = RandomKey.of(f"{seed} {slot.name} {copy}"), tuple(d.known for d in slot.value.shape)
    if op.uniform:  # between -1 and 1 the standard deviation is 1/sqrt(3)
        values = uniform_values(key, sizes, box, device).mul_(sqrt(3))
    else:
        values = normal_values(key, sizes, box, device)
    values.mul_(slot.std)
    return values.add_(op.mean) if op.mean else values
