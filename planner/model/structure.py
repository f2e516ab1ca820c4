"""What the planner reads off a graph once, whatever the layout: which nodes are alike, where it can be cut.

Protocol: `anatomy(graph)`; nodes of one `Kind` cost the same wherever they stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from megaloom.dsl.facts.primitives import program
from megaloom.dsl.facts.recompute import Again, again
from megaloom.dsl.facts.saved import Keeps, keeps
from megaloom.dsl.graph import Graph, Node, Slot
from megaloom.planner.contract.layout import Module
from megaloom.planner.contract.layouts import Rows


@frozen
class Kind:
    """Nodes that cost the same wherever they stand."""

    node: Node  # one of them
    keeps: Keeps  # what counts for it, of the tensors that several nodes save
    full: Keeps  # under full recompute
    ends: bool  # the loss is taken of it

    @property
    def inside(self) -> bool:
        """Whether full recompute computes it again."""
        return self.full.again


@frozen(eq=False, slots=False)
class Anatomy:
    """What the planner reads off a graph once."""

    graph: Graph
    kinds: tuple[Kind, ...]
    kind: NDArray[np.intp]  # of each node
    parts: tuple[Again, ...]  # what modules share or have alone: each the modules any of which compute it again
    shared: tuple[tuple[Slot, tuple[int, ...]], ...]  # weights that several nodes use, and which
    embed: int  # width of each hidden state that crosses a cut

    @cached_property
    def places(self) -> NDArray[np.intp]:
        """Where a stage may begin or end."""
        return np.array([0, *self.graph.cuts, len(self.graph.nodes)])

    @cached_property
    def borders(self) -> NDArray[np.intp]:
        """Those of them that are not inside of a block."""
        blocks = [n.block for n in self.graph.nodes]
        inside = [False, *(a is not None and a == b for a, b in pairwise(blocks)), False]
        return np.array([i for i in self.places.tolist() if not inside[i]])

    @cached_property
    def crosses(self) -> NDArray[np.intp]:
        """How many hidden states what begins at a node is given; behind the last one, how many outputs there are."""
        return np.array([*(len(names) for names in self.graph.crossing), len(self.graph.outputs)])

    @cached_property
    def counts(self) -> Rows:
        """How many nodes there are of each kind."""
        return np.bincount(self.kind, minlength=len(self.kinds)).astype(float)

    @cached_property
    def blocks(self) -> Rows:
        """How many nodes of each kind there are in each block that differs from the others: [blocks, kinds]."""
        rows: dict[int, Rows] = {}
        for node, kind in zip(self.graph.nodes, self.kind, strict=True):
            if node.block is not None:
                rows.setdefault(node.block, np.zeros(len(self.kinds)))[kind] += 1
        return np.array(list({tuple(row): row for row in rows.values()}.values())).reshape(-1, len(self.kinds))

    @cached_property
    def atoms(self) -> Rows:
        """How many nodes of each kind there are between each two neighbouring places that differ: [atoms, kinds]."""
        rows = np.add.reduceat(np.eye(len(self.kinds))[self.kind], self.places[:-1])
        return np.array(list({tuple(row): row for row in rows}.values()))

    @cached_property
    def inside(self) -> Rows:
        """How many nodes of each kind there are in blocks."""
        blocks = np.array([node.block is not None for node in self.graph.nodes])
        return np.bincount(self.kind[blocks], minlength=len(self.kinds)).astype(float)

    @cached_property
    def ahead(self) -> int:
        """The node at which blocks begin that predict tokens further ahead, which the first output does without."""
        nodes, needed = self.graph.nodes, {self.graph.outputs[0]}
        for n in reversed(nodes):
            needed.update(n.inputs if n.name in needed else ())
        return next((i for i, n in enumerate(nodes) if n.block is not None and n.name not in needed), len(nodes))

    @cached_property
    def numbered(self) -> int:
        """How many blocks may be computed again by their number in a stage.

        Those that predict further ahead are not (megatron-core 0.16.1, multi_token_prediction.py:853).
        """
        return len({node.block for node in self.graph.nodes[: self.ahead]} - {None})

    @lru_cache(maxsize=256)  # noqa: B019 - an anatomy is kept by its graph's own cache
    def after(self, count: int) -> NDArray[np.intp]:
        """For each place the end of the last of `count` numbered blocks, of which the first may be begun already."""
        nodes, here = self.graph.nodes[: self.ahead], np.arange(len(self.graph.nodes) + 1)
        ends = [i + 1 for i, n in enumerate(nodes) if n.block is not None and _next(nodes, i) != n.block]
        which = np.searchsorted(ends, here, side="right") + count - 1
        last = np.array([*ends, *[self.ahead] * count])[np.minimum(which, len(ends) + count - 1)]
        stop: NDArray[np.intp] = np.maximum(last, here)
        return stop

    @cached_property
    def block(self) -> Rows:
        """How many nodes of each kind the largest block has."""
        return max(self.blocks, key=lambda row: float(row.sum()), default=np.zeros(len(self.kinds)))

    @property
    def modules(self) -> tuple[Module, ...]:
        """Those that the model has."""
        return tuple(m for m in Module if any(m in part for part in self.parts))

    def made(self, chosen: Iterable[Module]) -> NDArray[np.bool_]:
        """Which parts these modules compute again."""
        return np.array([not part.isdisjoint(chosen) for part in self.parts], dtype=bool)


def _next(nodes: Sequence[Node], i: int) -> int | None:
    """The next node's block."""
    return nodes[i + 1].block if i + 1 < len(nodes) else None


@lru_cache(maxsize=16)
def anatomy(graph: Graph) -> Anatomy:
    """What the planner reads off a graph once."""
    known: dict[tuple[object, ...], int] = {}
    kinds: list[Kind] = []
    kind: list[int] = []
    uses: dict[str, list[int]] = {}
    modes = zip(keeps(graph.nodes), keeps(graph.nodes, "full"), strict=True)
    for i, ((node, own), (_, full)) in enumerate(modes):
        ends = node.name in graph.outputs
        key = (id(program(node)), own, full, ends)
        if key not in known:
            known[key] = len(kinds)
            kinds.append(Kind(node, own, full, ends))
        kind.append(known[key])
        for slot in node.weights:
            uses.setdefault(slot.name, []).append(i)
    shared = tuple((graph.weights[name], tuple(nodes)) for name, nodes in uses.items() if len(nodes) > 1)
    width = next((n.shape["embed"].known for n in graph.nodes if not n.input and "embed" in n.shape), 1)
    return Anatomy(graph, tuple(kinds), np.array(kind), _parts(kinds), shared, width)


def _parts(kinds: Iterable[Kind]) -> tuple[Again, ...]:
    found: set[Again] = set()
    for kind in kinds:
        found.update(again(program(kind.node)).values())
        found.update({frozenset({"layernorm"})} if kind.keeps.norm else ())
    return tuple(sorted(found - {frozenset()}, key=lambda part: sorted(part)))
