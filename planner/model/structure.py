"""Structure of a model graph that every layout shares: node kinds, cut points, segments, blocks and shared weights.

`model_structure(graph)` returns it, computed once for each graph. Nodes of one `NodeKind` cost the same under every
layout, so costs are computed for each kind and summed with the counts given here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from megaloom.dsl.dims import Shape
from megaloom.dsl.facts.costs import logits_ports
from megaloom.dsl.facts.primitives import program
from megaloom.dsl.facts.recompute import RecomputedBy, modules_of_ops
from megaloom.dsl.facts.saved import SavedPart, saved_parts
from megaloom.dsl.graph import Graph
from megaloom.dsl.node import Node, Slot
from megaloom.planner.contract.choices import Module
from megaloom.planner.contract.layouts import Rows


@frozen
class NodeKind:
    """Graph nodes that cost the same under every layout."""

    node: Node  # one of them
    saved: SavedPart  # its share of the saved activations, where several nodes save one tensor
    saved_under_full: SavedPart  # its share under full recompute
    cross_entropies: int  # computed of this node's output

    @property
    def has_loss(self) -> bool:
        """True if a cross-entropy is computed of this node's output."""
        return self.cross_entropies > 0

    @property
    def in_recomputed_block(self) -> bool:
        """True if full recompute computes this node again."""
        return self.saved_under_full.recomputed


@frozen(eq=False, slots=False)
class ModelStructure:
    """Structure of a graph, independent of the layout. Arrays over kinds have one entry for each of `kinds`."""

    graph: Graph
    kinds: tuple[NodeKind, ...]
    kind_of_node: NDArray[np.intp]  # [nodes] index into `kinds`
    recompute_parts: tuple[RecomputedBy, ...]  # sets of modules: a part is recomputed if any module of its set is
    shared_weights: tuple[tuple[Slot, tuple[int, ...]], ...]  # parameters of several nodes, with those nodes
    hidden_size: int  # width of the widest hidden states
    losses: Counter[str]  # nodes of logits, with the number of cross-entropies that are computed of them

    @cached_property
    def cut_points(self) -> NDArray[np.intp]:
        """Return the nodes before which a stage may begin, with 0 and the number of nodes, in order."""
        return np.array([0, *self.graph.cut_points, len(self.graph.nodes)])

    @cached_property
    def block_cut_points(self) -> NDArray[np.intp]:
        """Return the cut points that do not lie inside a block."""
        blocks = [n.block for n in self.graph.nodes]
        inside = [False, *(a is not None and a == b for a, b in pairwise(blocks)), False]
        return np.array([i for i in self.cut_points.tolist() if not inside[i]])

    @cached_property
    def live_shapes(self) -> tuple[tuple[Node, ...], NDArray[np.int64]]:
        """Return a node for each shape of the values that cross a stage boundary, and how many of each shape cross.

        The numbers are those before each node where a stage may begin: [nodes + 1, shapes]. The last row is that of the
        last stage.
        """
        live, index, shapes = self.graph.live_values, self.graph.index, dict[Shape, Node]()
        for names in (live[i] for i in self.graph.cut_points):
            for node in (self.graph.nodes[index[name]] for name in names):
                shapes.setdefault(node.shape, node)
        counts = np.zeros((len(self.graph.nodes) + 1, len(shapes)), dtype=np.int64)
        for i in self.graph.cut_points:
            found = Counter(self.graph.nodes[index[name]].shape for name in live[i])
            counts[i] = counts[-1] = [found[shape] for shape in shapes]
        return tuple(shapes.values()), counts

    @cached_property
    def kind_counts(self) -> Rows:
        """Return the number of nodes of each kind: [kinds]."""
        return np.bincount(self.kind_of_node, minlength=len(self.kinds)).astype(float)

    @cached_property
    def distinct_blocks(self) -> Rows:
        """Return the number of nodes of each kind in each block, without repeated rows: [blocks, kinds]."""
        return np.array([*self._block_repeats]).reshape(-1, len(self.kinds))

    @property
    def block_repeats(self) -> Rows:
        """Return how often each of `distinct_blocks` is there: [blocks]."""
        return np.array([*self._block_repeats.values()], dtype=float)

    @cached_property
    def _block_repeats(self) -> Counter[tuple[float, ...]]:
        rows: dict[int, Rows] = {}
        for node, kind in zip(self.graph.nodes, self.kind_of_node, strict=True):
            if node.block is not None:
                rows.setdefault(node.block, np.zeros(len(self.kinds)))[kind] += 1
        return Counter(tuple(row.tolist()) for row in rows.values())

    @cached_property
    def distinct_segments(self) -> Rows:
        """Return the number of nodes of each kind in each segment, without repeated rows: [segments, kinds]."""
        rows = np.add.reduceat(np.eye(len(self.kinds))[self.kind_of_node], self.cut_points[:-1])
        return np.array(list({tuple(row): row for row in rows}.values()))

    @cached_property
    def kind_counts_in_blocks(self) -> Rows:
        """Return the number of nodes of each kind that belong to a block: [kinds]."""
        blocks = np.array([node.block is not None for node in self.graph.nodes])
        return np.bincount(self.kind_of_node[blocks], minlength=len(self.kinds)).astype(float)

    @cached_property
    def multi_token_start(self) -> int:
        """Return the node at which multi-token prediction begins: the first block that prediction 0 does not use."""
        nodes, needed = self.graph.nodes, {self.graph.predictions[0]}
        for n in reversed(nodes):
            needed.update(n.inputs if n.name in needed else ())
        return next((i for i, n in enumerate(nodes) if n.block is not None and n.name not in needed), len(nodes))

    @cached_property
    def recomputable_blocks(self) -> int:
        """Return the number of blocks that `recompute_layers` counts.

        Blocks of multi-token prediction do not count (megatron-core 0.16.1, multi_token_prediction.py:853).
        """
        return len({node.block for node in self.graph.nodes[: self.multi_token_start]} - {None})

    @lru_cache(maxsize=256)  # noqa: B019 - a structure lives as long as the cache of its graph
    def recompute_end(self, count: int) -> NDArray[np.intp]:
        """Return, for a stage that begins at each node, the node after its first `count` blocks: [nodes + 1].

        A block that begins before the stage counts as its first one.
        """
        nodes, begins = self.graph.nodes[: self.multi_token_start], np.arange(len(self.graph.nodes) + 1)
        ends = [i + 1 for i, n in enumerate(nodes) if n.block is not None and _next_block(nodes, i) != n.block]
        which = np.searchsorted(ends, begins, side="right") + count - 1
        last = np.array([*ends, *[self.multi_token_start] * count])[np.minimum(which, len(ends) + count - 1)]
        stop: NDArray[np.intp] = np.maximum(last, begins)
        return stop

    @cached_property
    def has_experts(self) -> bool:
        """Return True if a tensor of some node has a dim of experts."""
        steps = [step for kind in self.kinds for step in program(kind.node).steps]
        return any(step.table.axis(d) == "ep" for step in steps for d in (*step.outer, *step.value.shape))

    @cached_property
    def largest_block(self) -> Rows:
        """Return the number of nodes of each kind in the block with most nodes: [kinds]."""
        return max(self.distinct_blocks, key=lambda row: float(row.sum()), default=np.zeros(len(self.kinds)))

    def repeated_elements(
        self, shared_elements: Sequence[int], bounds: Sequence[int], pp: int
    ) -> dict[bool, NDArray[np.int64]]:
        """Return the elements that each stage counts of weights that it, or an earlier stage of its rank, has too.

        Those of trained weights are under True, those of frozen ones under False: [stages]. shared_elements: elements
        on one device of each of `shared_weights`. bounds: stage boundaries, as node numbers.
        """
        repeated = {trained: np.zeros(len(bounds) - 1, dtype=np.int64) for trained in (True, False)}
        for (slot, nodes), elements in zip(self.shared_weights, shared_elements, strict=True):
            seen: set[int] = set()
            for stage in stages_of(nodes, bounds):
                repeated[slot.trained][stage] += elements * (stage % pp in seen)
                seen.add(stage % pp)
        return repeated

    def copies(self, bounds: Sequence[int], pp: int) -> dict[int, tuple[int, ...]]:
        """Return the pipeline ranks that hold a copy of a trained weight, by its position in `shared_weights`."""
        trained = ((i, nodes) for i, (slot, nodes) in enumerate(self.shared_weights) if slot.trained)
        return {i: tuple(sorted({stage % pp for stage in stages_of(nodes, bounds)})) for i, nodes in trained}

    @property
    def modules(self) -> tuple[Module, ...]:
        """Return the modules of the model that selective recompute may name."""
        return tuple(m for m in Module if any(m in part for part in self.recompute_parts))

    def recomputed_parts(self, chosen: Iterable[Module]) -> NDArray[np.bool_]:
        """Return a mask of the recompute parts that these modules recompute: [parts]."""
        return np.array([not part.isdisjoint(chosen) for part in self.recompute_parts], dtype=bool)


def stages_of(nodes: Sequence[int], bounds: Sequence[int]) -> list[int]:
    """Return the stage of each of these nodes, given the stage boundaries as node numbers."""
    return [bisect_right(bounds, node) - 1 for node in nodes]


def _next_block(nodes: Sequence[Node], i: int) -> int | None:
    """Return the block of the node after node i."""
    return nodes[i + 1].block if i + 1 < len(nodes) else None


@lru_cache(maxsize=16)
def model_structure(graph: Graph) -> ModelStructure:
    """Return the structure of a graph."""
    known: dict[tuple[object, ...], int] = {}
    kinds: list[NodeKind] = []
    kind_of_node: list[int] = []
    uses: dict[str, list[int]] = {}
    losses = _cross_entropies(graph)
    modes = zip(saved_parts(graph.nodes), saved_parts(graph.nodes, "full"), strict=True)
    for i, ((node, saved), (_, under_full)) in enumerate(modes):
        shares = any(not s.name.startswith(f"{node.name}.") for s in node.weights)  # it runs by its body then
        key = (id(program(node)), saved, under_full, losses[node.name], shares)
        if key not in known:
            known[key] = len(kinds)
            kinds.append(NodeKind(node, saved, under_full, losses[node.name]))
        kind_of_node.append(known[key])
        for slot in (s for s in node.weights if s.is_parameter):
            uses.setdefault(slot.name, []).append(i)
    shared = tuple((graph.weights[name], tuple(nodes)) for name, nodes in uses.items() if len(nodes) > 1)
    width = max(graph.hidden_sizes, default=1)
    return ModelStructure(graph, tuple(kinds), np.array(kind_of_node), _parts(kinds), shared, width, losses)


def _cross_entropies(graph: Graph) -> Counter[str]:
    """Return, for each node of logits, the number of cross-entropies that are computed of them.

    An output that is no loss has one, since a model is planned as it will be trained.
    """
    nodes = [graph.nodes[graph.index[name]] for name in graph.outputs]
    out = Counter(n.name for n in nodes if not n.is_loss)
    for node in (n for n in graph.nodes if n.is_loss):
        out.update(node.inputs[port] for port in logits_ports(program(node)))
    return out


def _parts(kinds: Iterable[NodeKind]) -> tuple[RecomputedBy, ...]:
    parts: set[RecomputedBy] = set()
    for kind in kinds:
        parts.update(modules_of_ops(program(kind.node)).values())
        parts.update({frozenset({Module.LAYERNORM})} if kind.saved.norm else ())
    return tuple(sorted(parts - {frozenset()}, key=lambda part: sorted(part)))
