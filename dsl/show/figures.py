"""What each node of a model costs, such that all of them add up to the model.

What several nodes have in common is counted in one of them: in the first, or, if they lie in several iterations of a
repeat, where no iteration has more of it than the next. For a saved tensor that is the node that makes it; a weight
then belongs to none of them and is listed apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import astuple, frozen

from megaloom.dsl.dims import NBYTES, Sizes
from megaloom.dsl.facts.costs import Costs, Saved
from megaloom.dsl.graph import Graph, Node, Slot

Path = tuple[int, ...]  # the iterations of repeats around a node, outermost first


@frozen
class Figures:
    """Parameters, FLOPs by pass, and the elements and bytes that are kept for the backward pass."""

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


NOUGHT = Figures()


def total(parts: Iterable[Figures]) -> Figures:
    """The sum of these."""
    return sum(parts, NOUGHT)


@frozen
class Account:
    """Figures by node, the names of the weights that a node reads but that count elsewhere, and the weights apart."""

    figures: Mapping[str, Figures]
    tied: Mapping[str, tuple[str, ...]]
    shared: tuple[Slot, ...]


def account(g: Graph, paths: Mapping[str, Path], cost: Callable[[Node], Costs], element: int) -> Account:
    """The figures of each node, in the order in which `paths` says where they are, for activations of so many bytes."""
    nodes = [g.nodes[g.index[name]] for name in paths]
    each = {n.name: cost(n) for n in nodes}
    figures = {name: _flops(c) for name, c in each.items()}
    for owner, s in _kept(nodes, paths, each):
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
    return Account(figures, tied, tuple(g.weights[name] for name, owner in owners.items() if owner is None))


def size(slot: Slot) -> int:
    """The parameters of a weight: none, if it is not trained."""
    return Sizes()(slot.dims) if slot.trained else 0


def _flops(c: Costs) -> Figures:
    return Figures(
        forward=sum(w.flops for w in c.work), dgrad=sum(w.dgrad for w in c.work), wgrad=sum(w.wgrad for w in c.work)
    )


def _kept(nodes: Sequence[Node], paths: Mapping[str, Path], each: Mapping[str, Costs]) -> Iterable[tuple[str, Saved]]:
    """Each distinct tensor that is kept, as `facts.saved` counts them, with the node that it counts for."""
    kept: dict[tuple[str, int | None], tuple[Saved, list[str]]] = {}
    for n in nodes:
        for i, s in enumerate(each[n.name].saved):
            maker = n.name if s.port is None or s.port < 0 else n.inputs[s.port]
            kept.setdefault((maker, i if s.port is None else None), (s, []))[1].append(n.name)
    for (maker, _), (s, keepers) in kept.items():
        yield _owner(keepers, paths) or maker, s


def _owner(nodes: Sequence[str], paths: Mapping[str, Path]) -> str | None:
    """The first of these nodes that lies in all the iterations in which the others do."""
    outermost = min(map(len, map(paths.__getitem__, nodes)))
    first = next(n for n in nodes if len(paths[n]) == outermost)
    return first if all(paths[n][:outermost] == paths[first] for n in nodes) else None
