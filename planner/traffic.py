"""Seconds of one collective on one group of devices, by the links that the group crosses.

Protocol: `group` says which devices an axis joins, `seconds` what a collective costs there, `hop` what a value costs
that passes to the next pipeline rank. Every group of an axis works at once; a device has its own share of its node's
network (`Cluster.inter` is one device's), so a group leaves a node on as many shares as it has members there.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from attrs import frozen

from .cluster import Cluster, Link
from .layout import Layout

# How often the whole tensor passes each device's link, less the share that it has already: NCCL's ring algorithms
# (nccl-tests, doc/PERFORMANCE.md).
PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}


@frozen
class Group:
    """`size` devices whose ranks are `stride` apart."""

    size: int
    stride: int


def group(axis: str, layout: Layout) -> Group:
    """The devices that an axis joins, in megatron-core's order of ranks: tp, cp, ep, dp, pp, the first the closest.

    "dp" is the group over which dense gradients are reduced (dp and cp together), "edp" that of experts.
    Source: megatron-core 0.16.1, parallel_state.py:562.
    """
    match axis:
        case "tp" | "etp":
            return Group(getattr(layout, axis), 1)
        case "cp":
            return Group(layout.cp, layout.tp)
        case "dp":
            return Group(layout.dp * layout.cp, layout.tp)
        case "ep":
            return Group(layout.ep, layout.etp)
        case "edp":
            return Group(layout.edp, layout.etp * layout.ep)
        case "pp":
            return Group(layout.pp, layout.world // layout.pp)
    raise ValueError(f"no axis {axis!r}")


@lru_cache(maxsize=4096)
def spread(size: int, stride: int, per_node: int, count: int) -> tuple[int, int]:
    """How the groups of this kind lie over the nodes: most nodes of one, fewest of its members in a node it touches."""
    most, fewest = 1, size
    for start in {block * size * stride % per_node for block in range(max(1, count // (size * stride)))}:
        for first in {start, start + stride - 1}:
            members = Counter((first + i * stride) // per_node for i in range(size))
            most, fewest = max(most, len(members)), min(fewest, *members.values(), size)
    return most, fewest


def seconds(kind: str, nbytes: float, group: Group, cluster: Cluster) -> float:
    """Seconds of a collective over a tensor of `nbytes`: the whole of it, for all-to-all one device's part.

    A ring: each of its steps after the first costs a hop, and its slowest link decides how fast the bytes pass. Of an
    all-to-all, what stays in the node and what leaves it take their own ways at once.
    """
    n = group.size
    if n == 1 or nbytes == 0:
        return 0.0
    nodes, members = spread(n, group.stride, cluster.per_node, cluster.count)
    near, far = cluster.intra, cluster.inter
    steps = PASSES[kind] * (n - 1)
    across = 0 if nodes == 1 else PASSES[kind] * nodes
    latency = (far if across else near).latency
    latency += min(across, steps) * far.hop + max(0, steps - across - (not across)) * near.hop
    if kind == "all_to_all":
        local = members if across else n
        return latency + max(_pass(nbytes * (local - 1) / n, near), _pass(nbytes * (n - local) / n, far))
    wire = PASSES[kind] * nbytes * (n - 1) / n
    inside = _pass(wire, near) if members > 1 else 0.0
    return latency + max(inside, _pass(wire / members, far) if across else 0.0)


def _pass(nbytes: float, link: Link) -> float:
    return nbytes / (link.bandwidth * link.efficiency)


def hop(nbytes: float, stage: int, layout: Layout, cluster: Cluster) -> float:
    """Seconds in which `nbytes` pass from a pipeline stage to the next one, on the worst placed of its devices."""
    if layout.pp == 1 or nbytes == 0:
        return 0.0
    stride = layout.world // layout.pp
    a, b = stage % layout.pp * stride, (stage + 1) % layout.pp * stride
    near = all((a + i) // cluster.per_node == (b + i) // cluster.per_node for i in {0, stride - 1})
    link = cluster.intra if near else cluster.inter
    return link.latency + _pass(nbytes, link)
