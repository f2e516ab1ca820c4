"""What a model asks of a layout, read off the dims of its weights and the places where it can be cut."""

from __future__ import annotations

from functools import lru_cache

from attrs import frozen

from megaloom.dsl.facts.positions import longest
from megaloom.dsl.graph import Graph
from megaloom.dsl.sharding_table import SPLITS, among_experts, cut
from megaloom.planner.contract.layout import Module

from .structure import anatomy


@frozen
class Needs:
    """What a graph asks of a layout: the sizes that an axis must divide, by (axis, dim), and where it can be cut."""

    sizes: dict[tuple[str, str], tuple[int, ...]]
    positions: tuple[int, ...]  # how long learned tables let sequences be
    stages: int  # at most
    blocks: int  # iterations of its repeats
    biased: bool  # experts add biases
    keys: tuple[tuple[int, int], ...]  # the numbers of key/value heads, each with the channels of one
    modules: tuple[Module, ...]  # that selective recompute may compute again
    ahead: int  # outputs beside the first: layers that predict tokens further ahead

    def of(self, axis: str, *but: str) -> list[tuple[str, int]]:
        """The (dim, size) that an axis divides, but for some dims."""
        return [
            (dim, size) for (on, dim), sizes in self.sizes.items() if on == axis and dim not in but for size in sizes
        ]

    @property
    def experts(self) -> bool:
        """Whether there are any."""
        return ("ep", "experts") in self.sizes


@lru_cache(maxsize=64)
def needs(graph: Graph) -> Needs:
    """What this graph asks of any layout."""
    sizes: dict[tuple[str, str], set[int]] = {}
    biased, keys = False, set[tuple[int, int]]()
    for node in graph.nodes:
        table = {**SPLITS, **getattr(node.op, "splits", {})}
        for slot in node.weights:
            known = {d.name: d.size for d in slot.dims if d.size is not None}
            if "kv_heads" in known and "head_dim" in known:
                keys.add((known["kv_heads"], known["head_dim"]))
            biased |= among_experts(table, slot.outer) and len(slot.value.shape.dims) == 1
            for dim, axis in cut(table, slot.outer, slot.value.shape.dims).items():
                if dim in known:
                    sizes.setdefault((axis, dim), set()).add(known[dim])
    return Needs(
        sizes={key: tuple(sorted(found)) for key, found in sizes.items()},
        positions=tuple(sorted(longest(graph).values())),
        stages=len(graph.cuts) + 1,
        blocks=len({node.block for node in graph.nodes} - {None}),
        biased=biased,
        keys=tuple(sorted(keys)),
        modules=anatomy(graph).modules,
        ahead=len(graph.outputs) - 1,
    )
