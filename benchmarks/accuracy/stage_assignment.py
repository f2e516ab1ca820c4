"""Assignment of a model's blocks to pipeline stages, as published frameworks do it.

Each function returns the stage boundaries, or None if the framework cannot assign the blocks. What comes before the
first block goes to the first stage, what comes after the last block to the last stage.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from megaloom.dsl.dims import Sizes
from megaloom.dsl.graph import Graph
from megaloom.dsl.node import Node
from megaloom.planner.partition.partitioner import StageBounds


def evenly(g: Graph, stages: int) -> StageBounds | None:
    """Return stages of equally many blocks; if that is impossible, embedding and head count as a block each.

    Source: Megatron-LM, --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split;
    type:transformer|embedding of Megatron-DeepSpeed. A model with several outputs counts blocks alone.
    """
    positions = _block_starts(g)
    blocks = len(positions) - 1
    ends = int(blocks % stages > 0 and len(g.outputs) == 1)
    each, rest = divmod(blocks + 2 * ends, stages)
    return None if rest else _bounds(g, [positions[i * each - ends] for i in range(1, stages)])


def filled(g: Graph, stages: int) -> StageBounds | None:
    """Return `evenly`; if that is impossible, stages of ceil(blocks / stages) blocks, the last with the rest.

    Source: github.com/microsoft/DeepSpeed, deepspeed/runtime/utils.py: partition_balanced.
    """
    if bounds := evenly(g, stages):
        return bounds
    positions = _block_starts(g)
    inner = positions[:: -(-(len(positions) - 1) // stages)][1:stages]
    return _bounds(g, inner) if len(inner) == stages - 1 else None


def by_weights(g: Graph, stages: int) -> StageBounds | None:
    """Return stages that each end with the block, or the head, at which its share of the weight matrices is exceeded.

    Embeddings do not count. If the head ends the stage before the last one, the last stage has the loss alone; here the
    loss is a part of the head, so that the final norm stays in the stage before.
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
    """Return the elements of the weight matrices of a node."""
    return sum(Sizes()(slot.dims) for slot in node.weights if len(slot.dims) > 1)


def _block_starts(g: Graph) -> list[int]:
    """Return the node at which each block begins, and the node after the last block."""
    positions = [i for i in _starts(g) if g.nodes[i].block is not None]
    last = max(positions, default=0)
    return [*positions, next((i for i in range(last, len(g.nodes)) if g.nodes[i].block is None), len(g.nodes))]


def _starts(g: Graph) -> list[int]:
    """Return the nodes at which a block begins, and the nodes outside of blocks."""
    pairs = enumerate(pairwise(g.nodes), 1)
    return [0, *(i for i, (before, node) in pairs if node.block is None or node.block != before.block)]


def _bounds(g: Graph, inner: list[int]) -> StageBounds | None:
    return (0, *inner, len(g.nodes)) if {*inner} <= {*g.cut_points} else None
