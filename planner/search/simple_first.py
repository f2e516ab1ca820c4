"""The order of layouts that are nearly as fast as the fastest one: the simplest first, as an expert would run it.

`best_of_each_mesh` has the layout that a search recommends and those that it shows beside it; `SimplestLayouts` tells
the search which layouts may still change that choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from operator import attrgetter

from attrs import define, field

from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.simulate.price import Priced

from .device_meshes import DeviceMesh, device_mesh

NEAR_RATIO = 1.01  # a layout that is at most this much slower than the fastest one may be recommended in its place


def simplicity_order(x: Layout, cluster: Cluster) -> tuple[float, ...]:
    """Return a key that orders layouts by simplicity, the simplest first; each number decides where those before tie.

    1. Axes in use of tp, pp, cp, ep and etp. Sharded gradients or weights count as one more, for they communicate in
       each pass. Plain data parallelism is free, and model chunks (vpp) come third.
    2. Whether tensor-parallel ranks, of dense layers or of experts, are in more than one node.
    3. vpp. 4. cp. 5. Recompute: none before selective before full; fewer modules; fewer blocks of each stage.
    6. Degrees, vpp and the micro-batch size that are not powers of two.
    """
    degrees = (x.tp, x.pp, x.cp, x.ep, x.etp)
    across = cluster.nodes > 1 and any(cluster.per_node % tp for tp in (x.tp, x.etp))
    blocks = (x.recompute_layers or inf) if x.recompute is Recompute.FULL else 0
    odd = sum(map(_odd, (*degrees, x.vpp, x.micro_batch)))
    axes = sum(n > 1 for n in degrees) + x.fsdp
    return axes, across, x.vpp, x.cp, x.recompute, len(x.recomputed_modules), blocks, odd


def _odd(degree: int) -> bool:
    """Return whether a degree is no power of two."""
    return degree & (degree - 1) > 0


def preference(priced: Priced) -> tuple[float, ...]:
    """Return a key that orders layouts of nearly one step time: simplest first, then least memory, then least time."""
    cluster = priced.partition.problem.job.cluster
    return *simplicity_order(priced.layout, cluster), max(priced.partition.peaks), priced.seconds


def simplicity_words(x: Layout, cluster: Cluster) -> tuple[str, ...]:
    """Return in words what each number of `simplicity_order` counts; a name ends in a colon if it is said once."""
    degrees = {"tp": x.tp, "pp": x.pp, "cp": x.cp, "ep": x.ep, "etp": x.etp}
    used = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
    axes = ", ".join([*used, f"shard {x.shard}"] if x.fsdp else used) or "dp alone"
    tensor = f"tp {x.tp}" if x.tp >= x.etp else f"etp {x.etp}"
    where = "across nodes" if simplicity_order(x, cluster)[1] else "within a node"
    odd = degrees | {"vpp": x.vpp, "mbs": x.micro_batch}
    named = ", ".join(f"{axis} {degree}" for axis, degree in odd.items() if _odd(degree)) or "powers of two"
    recompute = (f"recompute: {x.recompute_text}",) * 3
    return axes, f"{tensor} {where}", f"vpp: {x.vpp}", f"cp: {x.cp}", *recompute, named


def contrast(one: Layout, other: Layout, cluster: Cluster) -> str:
    """Return the first difference of two layouts in the order of simplicity, such as `vpp 7 instead of 14`; or ""."""
    orders, words = ([of(x, cluster) for x in (one, other)] for of in (simplicity_order, simplicity_words))
    for a, b, text, other_text in zip(*orders, *words, strict=True):
        if a != b:
            name, colon, value = text.partition(": ")
            said = f"{name} {value}" if colon else text
            return f"{said} instead of {other_text.removeprefix(f'{name}: ')}"
    return ""


def best_of_each_mesh(simulated: Sequence[Priced], ratio: float = NEAR_RATIO) -> list[Priced]:
    """Return the best layout of each device mesh, the recommended one first; `simulated` is sorted by step time.

    Layouts whose step is at most `ratio` times that of the fastest one come in order of preference, but the fastest
    itself, if it has another mesh than the recommended one, is the second. The others follow by step time, each the
    most preferred within `ratio` of the fastest of its mesh. If all have one device mesh, return all of them, the
    recommended first.
    """
    fastest, best = simulated[0], preferred(simulated, ratio)
    meshes: dict[DeviceMesh, list[Priced]] = {}
    for priced in simulated:
        meshes.setdefault(device_mesh(priced.layout), []).append(priced)
    if len(meshes) == 1:
        return [best, *(priced for priced in simulated if priced is not best)]
    limit, first = ratio * fastest.seconds, (device_mesh(best.layout), device_mesh(fastest.layout))
    found = [best] if first[0] == first[1] else [best, fastest]
    others = [variants for mesh, variants in meshes.items() if mesh not in first]
    near = [preferred(variants, limit / variants[0].seconds) for variants in others if variants[0].seconds <= limit]
    far = [preferred(variants, ratio) for variants in others if variants[0].seconds > limit]
    return [*found, *sorted(near, key=preference), *sorted(far, key=attrgetter("seconds"))]


def preferred(simulated: Sequence[Priced], ratio: float) -> Priced:
    """Return the most preferred of the layouts whose step is at most `ratio` times that of the first, the fastest."""
    return min((p for p in simulated if p.seconds <= ratio * simulated[0].seconds), key=preference)


@define(eq=False)
class SimplestLayouts:
    """The simplest layouts that are known of each device mesh, of those nearly as fast as the fastest one.

    `count` device meshes are of interest, those with the simplest layouts.
    """

    cluster: Cluster
    count: int
    _orders: dict[DeviceMesh, tuple[float, ...]] = field(factory=dict)

    def add(self, layouts: Iterable[Layout]) -> None:
        """Take layouts into account."""
        for x in layouts:
            mesh, order = device_mesh(x), simplicity_order(x, self.cluster)
            self._orders[mesh] = min(order, self._orders.get(mesh, order))

    def improved_by(self, x: Layout) -> bool:
        """Return whether a layout is simpler than all that are known of its mesh, and its mesh is of interest."""
        mesh, order = device_mesh(x), simplicity_order(x, self.cluster)
        first = sorted(self._orders.values())[: self.count]
        return order < self._orders.get(mesh, (inf,)) and (len(first) < self.count or order < first[-1])
