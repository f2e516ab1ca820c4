"""Requirements of a model on its layout: sizes that the axes must divide, stages, blocks, experts.

`model_requirements(graph)` reads them off the dims of the weights and the cut points. The rules compare a layout with
them.
"""

from __future__ import annotations

from functools import lru_cache

from attrs import frozen

from megaloom.dsl.facts.positions import longest
from megaloom.dsl.facts.primitives import program
from megaloom.dsl.graph import Graph
from megaloom.dsl.sharding_table import SEQUENCES
from megaloom.planner.contract.choices import Module

from .structure import model_structure


@frozen
class ModelRequirements:
    """Requirements of a graph on every layout."""

    divided_sizes: dict[tuple[str, str], tuple[int, ...]]  # (axis, dim) → sizes of the dim, which the axis must divide
    whole_sizes: dict[tuple[str, str], tuple[int, ...]]  # sizes that each device holds whole where it does not divide
    lengths: tuple[int, ...]  # sizes of the sequence dims that have one, such as an encoder's
    learned_positions: tuple[int, ...]  # the longest sequence that each table of learned positions allows
    max_stages: int
    blocks: int  # repeated blocks in the model
    expert_biases: bool  # experts add biases
    kv_heads: tuple[tuple[int, int], ...]  # (key/value heads, channels of one head) of the attention layers
    modules: tuple[Module, ...]  # that selective recompute may name
    multi_token: int  # outputs that predict tokens further ahead

    def sizes(self, axis: str, *but: str) -> list[tuple[str, int]]:
        """Return the (dim, size) pairs that an axis divides, without the dims named in `but`."""
        return [
            (dim, size)
            for (on, dim), sizes in self.divided_sizes.items()
            if on == axis and dim not in but
            for size in sizes
        ]

    @property
    def experts(self) -> bool:
        """True if the model has experts."""
        return ("ep", "experts") in self.divided_sizes


@lru_cache(maxsize=64)
def model_requirements(graph: Graph) -> ModelRequirements:
    """Return the requirements of a graph on every layout."""
    sizes: dict[str, dict[tuple[str, str], set[int]]] = {"even": {}, "whole": {}, "pad": {}}
    biased, kv_heads = False, set[tuple[int, int]]()
    for node in graph.nodes:
        table = program(node).table
        for slot in node.weights:
            known = {d.name: d.size for d in slot.dims if d.size is not None}
            if "kv_heads" in known and "head_dim" in known:
                kv_heads.add((known["kv_heads"], known["head_dim"]))
            biased |= table.among_experts(slot.outer) and len(slot.value.shape.dims) == 1
            for dim, axis in table.axes(slot.outer, slot.value.shape.dims).items():
                if dim in known:
                    sizes[table.dims[dim].policy].setdefault((axis, dim), set()).add(known[dim])
    return ModelRequirements(
        divided_sizes={key: tuple(sorted(values)) for key, values in sizes["even"].items()},
        whole_sizes={key: tuple(sorted(values)) for key, values in sizes["whole"].items()},
        lengths=tuple(sorted({d.size for n in graph.nodes for d in n.shape if d.name in SEQUENCES and d.size})),
        learned_positions=tuple(sorted(longest(graph).values())),
        max_stages=len(graph.cut_points) + 1,
        blocks=len({node.block for node in graph.nodes} - {None}),
        expert_biases=biased,
        kv_heads=tuple(sorted(kv_heads)),
        modules=model_structure(graph).modules,
        multi_token=len(graph.predictions) - 1,
    )
