"""The values that cross a stage boundary, packed into one tensor.

megatron-core's schedules send one tensor from a stage to the next, and back-propagate one. So the hidden states of an
encoder and of a decoder, of any lengths and widths, are sent together.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from attrs import frozen
from torch import Tensor

from megaloom.dsl import BATCH, Graph, Sizes, Split
from megaloom.dsl.facts.primitives import output_sizes
from megaloom.runtime.megatron.build_context import megatron_dims

ANY = -1  # in place of the number of samples


@frozen
class StageBoundary:
    """The names of the values that cross a boundary, and the shape of each on one device, with ANY samples."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, graph: Graph, node: int, split: Split, seq: int) -> StageBoundary:
        """Return the boundary before a node, given as its number; nothing crosses the two ends of a model."""
        names = graph.live_values[node] if node < len(graph.nodes) else ()
        sizes, shapes = Sizes(batch=1, seq=seq, source=seq), []
        for name in names:
            live = graph.nodes[graph.index[name]]
            local = dict(zip(live.shape, output_sizes(live, sizes, split), strict=True))
            shapes.append(tuple(ANY if d == BATCH else local[d] for d in megatron_dims(live.value)))
        return cls(names, tuple(shapes))

    @property
    def elements(self) -> tuple[int, ...]:
        """Return the elements of one sample of each value."""
        return tuple(abs(prod(shape)) for shape in self.shapes)

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return a copy of the values as one tensor [elements], which the schedules free when it is sent."""
        return torch.cat([values[name].reshape(-1) for name in self.names])

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """Return the values that `pack` has packed, by name."""
        samples = packed.numel() // sum(self.elements)
        parts = packed.split([samples * n for n in self.elements])
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=True)}
