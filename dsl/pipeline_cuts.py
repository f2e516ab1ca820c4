"""Where a graph may be cut into the stages of a pipeline, and what then crosses from one to the next.

Protocol: `crossing` are the values that are read behind each position, `divides` says whether a stage may begin there:
what crosses is hidden states, one of each sequence. So a decoder is cut where its own and those of the encoder that it
still reads cross. Behind the last block it may also be one for each output: so the heads of a model that predicts
several tokens are cut from its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .graph import Graph, Node


def crossing(nodes: Sequence[Node], outputs: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """For each position i, the nodes before it whose values are read at or after it; inputs don't count."""
    last = {name: len(nodes) for name in outputs}
    for i, n in enumerate(nodes):
        for name in n.inputs:
            last[name] = max(last.get(name, 0), i)
    alive: list[str] = []
    out = []
    for i, n in enumerate(nodes):
        alive = [name for name in alive if last.get(name, 0) >= i]
        out.append(tuple(alive))
        if not n.input:
            alive.append(n.name)
    return tuple(out)


def divides(g: Graph, i: int) -> bool:
    """Whether a stage may begin at this position."""
    return _narrow(g, g.crossing[i]) or _forks(g, i)


def _narrow(g: Graph, names: Sequence[str]) -> bool:
    shapes = [g.nodes[g.index[name]].shape for name in names]
    if not names or any(len(s.dims) != 3 or "batch" not in s or "embed" not in s for s in shapes):
        return False
    return len({s.positions("embed") for s in shapes}) == len(names)


def _forks(g: Graph, i: int) -> bool:
    """Whether the last block ends here, and each output follows from hidden states of its own."""
    rest, names = g.nodes[i:], g.crossing[i]
    if i == 0 or g.nodes[i - 1].block is None or any(n.block is not None for n in rest):
        return False
    roots = {name: {name} for name in names}
    for n in rest:
        roots[n.name] = set().union(*(roots.get(name, ()) for name in n.inputs))
    ends = [tuple(roots.get(name, ())) for name in g.outputs]
    return len(names) == len(ends) == len({*ends}) and all(len(e) == 1 and _narrow(g, e) for e in ends)
