"""How programs deal a model's blocks to the stages of a pipeline.

Protocol: each function gives the bounds of so many stages, or None if it has no way; what comes before the first block
or after the last goes to the ends.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from megaloom.dsl.dims import Sizes
from megaloom.dsl.graph import Graph, Node
from megaloom.planner.partition.partitioner import StageBounds


def evenly(g: Graph, stages: int) -> StageBounds | None:
    """Equally many blocks each; if these do not divide, with what is before and what is after them as one each.

    Source: Megatron-LM; its --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split, and
    type:transformer|embedding of Megatron-DeepSpeed. Of several outputs each program cuts as it sees fit.
    """
    places = _places(g)
    blocks = len(places) - 1
    ends = int(blocks % stages > 0 and len(g.outputs) == 1)
    each, rest = divmod(blocks + 2 * ends, stages)
    return None if rest else _bounds(g, [places[i * each - ends] for i in range(1, stages)])


def filled(g: Graph, stages: int) -> StageBounds | None:
    """The same; if nothing divides, each stage takes as many blocks as one has to, and the last what is left.

    Source: github.com/microsoft/DeepSpeed, deepspeed/runtime/utils.py: partition_balanced.
    """
    if bounds := evenly(g, stages):
        return bounds
    places = _places(g)
    inner = places[:: -(-(len(places) - 1) // stages)][1:stages]
    return _bounds(g, inner) if len(inner) == stages - 1 else None


def by_weights(g: Graph, stages: int) -> StageBounds | None:
    """A stage ends with the block, or the head, that exceeds its share of the matrices; embeddings are none.

    If that is the head, the last stage has the loss alone, which is a part of the head here: the norm before it stays.
    Source: github.com/huggingface/nanotron, src/nanotron/models/base.py: build_model.
    """
    starts = _starts(g)
    first = next((i for i, start in enumerate(starts) if g.nodes[start].block is not None), 0)
    sizes = [sum(map(_elements, g.nodes[a:b])) for a, b in pairwise([*starts, len(g.nodes)])]
    sums = [*accumulate([0] * first + sizes[first:])]
    ends: list[int] = []
    for i, done in enumerate(sums[:-1]):
        if done * stages > sums[-1] * (len(ends) + 1):
            ends.append(starts[i + 1])
    if len(ends) == stages - 2:
        ends.append(starts[-1])
    return _bounds(g, ends) if len(ends) == stages - 1 else None


def _elements(node: Node) -> int:
    """Of its matrices."""
    return sum(Sizes()(slot.dims) for slot in node.weights if len(slot.dims) > 1)


def _places(g: Graph) -> list[int]:
    """Where each block begins, and where the last one ends."""
    places = [i for i in _starts(g) if g.nodes[i].block is not None]
    last = max(places, default=0)
    return [*places, next((i for i in range(last, len(g.nodes)) if g.nodes[i].block is None), len(g.nodes))]


def _starts(g: Graph) -> list[int]:
    """Where a block begins, or a node outside of blocks."""
    pairs = enumerate(pairwise(g.nodes), 1)
    return [0, *(i for i, (before, node) in pairs if node.block is None or node.block != before.block)]


def _bounds(g: Graph, inner: list[int]) -> StageBounds | None:
    return (0, *inner, len(g.nodes)) if {*inner} <= {*g.cut_points} else None
