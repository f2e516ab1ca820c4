"""Parameters, FLOPs and saved activations of each node of a model. Their sums are the figures of the model.

A weight or saved tensor that several nodes share is counted once, at its first reader. If the readers lie in different
iterations of a repeat, a saved tensor is counted at the node that computes it, and a weight is listed separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import astuple, frozen

from megaloom.dsl.dims import NBYTES, Sizes
from megaloom.dsl.facts.costs import Costs
from megaloom.dsl.facts.saved import Saved
from megaloom.dsl.graph import Graph
from megaloom.dsl.node import Node, Slot

RepeatPath = tuple[int, ...]  # identifies the iterations of repeats around a node, outermost first


@frozen
class Figures:
    """Parameters, FLOPs of each pass, and elements and bytes saved for the backward pass."""

    params: int = 0
    forward: int = 0
    dgrad: int = 0
    wgrad: int = 0
    saved: int = 0
    nbytes: int = 0

    def __add__(self, other: Figures) -> Figures:
        return Figures(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> Figures:
        return Figures(*(times * n for n in astuple(self)))


ZERO = Figures()


def total(parts: Iterable[Figures]) -> Figures:
    """Return the sum of the figures of several nodes."""
    return sum(parts, ZERO)


@frozen
class NodeFigures:
    """Figures by node.

    tied: by node, the names of weights that it reads and that are counted at another node.
    shared: weights that are counted at no node.
    """

    figures: Mapping[str, Figures]
    tied: Mapping[str, tuple[str, ...]]
    shared: tuple[Slot, ...]


def node_figures(g: Graph, paths: Mapping[str, RepeatPath], cost: Callable[[Node], Costs], element: int) -> NodeFigures:
    """Return the figures of the nodes in `paths`. `element` is the size of an activation element in bytes."""
    nodes = [g.nodes[g.index[name]] for name in paths]
    node_costs = {n.name: cost(n) for n in nodes}
    figures = {name: _flops(c) for name, c in node_costs.items()}
    for owner, s in _saved_tensors(nodes, paths, node_costs):
        nbytes = s.elements * NBYTES.get(s.dtype, element)
        figures[owner] += Figures(saved=s.elements, nbytes=nbytes)
    users: dict[str, list[str]] = {}
    for n in nodes:
        for slot in n.weights:
            users.setdefault(slot.name, []).append(n.name)
    owners = {name: _owner(readers, paths) for name, readers in users.items()}
    for name, reader in owners.items():
        if reader:
            figures[reader] += Figures(params=size(g.weights[name]))
    tied = {n.name: tuple(s.name for s in n.weights if owners[s.name] != n.name) for n in nodes}
    return NodeFigures(figures, tied, tuple(g.weights[name] for name, owner in owners.items() if owner is None))


def size(slot: Slot) -> int:
    """Return the number of parameters of a weight; 0 for a buffer."""
    return Sizes()(slot.dims) if slot.is_parameter else 0


def _flops(c: Costs) -> Figures:
    return Figures(
        forward=sum(w.flops for w in c.work), dgrad=sum(w.dgrad for w in c.work), wgrad=sum(w.wgrad for w in c.work)
    )


def _saved_tensors(
    nodes: Sequence[Node], paths: Mapping[str, RepeatPath], node_costs: Mapping[str, Costs]
) -> Iterable[tuple[str, Saved]]:
    """Yield each saved tensor once, with the node that it is counted at."""
    tensors: dict[tuple[str, int | None], tuple[Saved, list[str]]] = {}
    for n in nodes:
        for i, s in enumerate(node_costs[n.name].saved):
            maker = n.name if s.port is None or s.port < 0 else n.inputs[s.port]
            tensors.setdefault((maker, i if s.port is None else None), (s, []))[1].append(n.name)
    for (maker, _), (s, readers_of_saved) in tensors.items():
        yield _owner(readers_of_saved, paths) or maker, s


def _owner(nodes: Sequence[str], paths: Mapping[str, RepeatPath]) -> str | None:
    """Return the first of the nodes with the fewest repeats around them, if all nodes lie inside these repeats."""
    outermost = min(map(len, map(paths.__getitem__, nodes)))
    first = next(n for n in nodes if len(paths[n]) == outermost)
    return first if all(paths[n][:outermost] == paths[first] for n in nodes) else None
