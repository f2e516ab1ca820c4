"""The cut points of a graph: the positions where a pipeline stage may begin, and the values live across each.

A stage may begin where every live value is hidden states [batch sequence embed], one value per sequence: a decoder is
cut where its own hidden states and those of the encoder are live. After the last block a stage may also begin where
each output has its own hidden states, so that the heads of multi-token prediction can form a stage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from .dims import Shape
from .node import Node


# Plain loops instead of networkx, with which tests/dsl/test_graph.py compares them: every `plan` needs the cut points,
# and importing networkx takes 240 ms (3.6, Python 3.11), while this takes 6 ms for the 372 nodes of DeepSeek-V3.
def live_values(nodes: Sequence[Node], outputs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return for each position i the nodes before i that a node at or after i reads. Inputs of the model don't count.

    The outputs of the model are read after the last node.
    """
    last_read = {name: len(nodes) for name in outputs}
    for i, n in enumerate(nodes):
        for name in n.inputs:
            last_read[name] = max(last_read.get(name, 0), i)
    live: list[str] = []
    out = []
    for i, n in enumerate(nodes):
        live = [name for name in live if last_read.get(name, 0) >= i]
        out.append(tuple(live))
        if not n.is_input:
            live.append(n.name)
    return tuple(out)


def cut_points(nodes: Sequence[Node], outputs: Sequence[str], live: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Return the positions where a stage may begin. live: for each position, the names that `live_values` gives."""
    shapes, positions = {n.name: n.shape for n in nodes}, []
    for i, names in enumerate(live):
        here = {name: shapes[name] for name in names}
        if _one_per_sequence(here.values()) or _one_per_output(nodes, outputs, i, here):
            positions.append(i)
    return tuple(positions)


def _one_per_sequence(shapes: Collection[Shape]) -> bool:
    """Return True if these are shapes of hidden states [batch sequence embed], each of another sequence."""
    if not shapes or any(len(s.dims) != 3 or "batch" not in s or "embed" not in s for s in shapes):
        return False
    return len({s.positions("embed") for s in shapes}) == len(shapes)


def _one_per_output(nodes: Sequence[Node], outputs: Sequence[str], i: int, live: Mapping[str, Shape]) -> bool:
    """Return True if the last block ends at position i and each output depends on one live value, all different.

    live: the shapes of the live values at position i.
    """
    rest = nodes[i:]
    if i == 0 or nodes[i - 1].block is None or any(n.block is not None for n in rest):
        return False
    roots = {name: {name} for name in live}  # the live values that a node depends on
    for n in rest:
        roots[n.name] = set().union(*(roots.get(name, ()) for name in n.inputs))
    ends = [tuple(roots.get(name, ())) for name in outputs]
    return len(live) == len(ends) == len({*ends}) and all(
        len(names) == 1 and _one_per_sequence([live[names[0]]]) for names in ends
    )
