"""Seconds of one collective on one group of devices, by the links that the group crosses.

Protocol: `group` says which devices an axis joins, `seconds` what a collective costs there, `hop` what a value costs
that passes to the next pipeline rank. Every group of an axis works at once; a device has its own share of its node's
network (`Cluster.inter` is one device's) and of its pod's, so a group leaves a node on as many shares as it has members
there. What two axes exchange at once adds up level by level: `busy` says how long each level is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from math import log2

from attrs import frozen

from megaloom.planner.contract.devices import Cluster, Device
from megaloom.planner.contract.layout import Layout

# How often the whole tensor passes each device's link, less the share that it has already: NCCL's ring algorithms
# (nccl-tests, doc/PERFORMANCE.md).
PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
TREE = 0.92  # of a ring's bandwidth (NCCL, src/graph/tuning.cc)
# Multiprocessors that are busy while data moves beside computation: of NCCL, one a channel between nodes (its log of
# such a communicator, as users post it: "16 coll channels"); of HybridEP as many (megatron-core 0.16.1,
# transformer_config.py:725), of DeepEP 20 (722).
CHANNELS = 16
# Kernels that send a token once reach less of NVLink than NCCL does: of its 680 GB/s 570 between 32 GB200 and 627
# between 8, of its 160 136 between 8 H800, what a device keeps not counted. A device of two nodes of H100 sends 33 GB/s
# to the other, of two nodes of B300, whose links are twice as fast, 29 to 51; of more nodes what its link passes. Where
# tokens go is made known before: what torch sees takes 0.04 to 0.12 ms more than the kernel and a copy of what has come
# (github.com/deepseek-ai/DeepEP, docs/README_Hybrid-EP.md, 16 multiprocessors, 16 bits; docs/legacy.md; issue 590).
KERNELS, NODE_TO_NODE, MESSAGE_SECONDS = 0.87, 33e9, 0.08e-3


@frozen
class ProcessGroup:
    """`size` devices whose ranks are `stride` apart."""

    size: int
    stride: int


def process_group(axis: str, layout: Layout) -> ProcessGroup:
    """The devices that an axis joins, in megatron-core's order of ranks: tp, cp, ep, dp, pp, the first the closest.

    "dp" is the group over which dense gradients are reduced (dp and cp together), "edp" that of experts.
    Source: megatron-core 0.16.1, parallel_state.py:562.
    """
    match axis:
        case "tp" | "etp":
            return ProcessGroup(getattr(layout, axis), 1)
        case "cp":
            return ProcessGroup(layout.cp, layout.tp)
        case "dp":
            return ProcessGroup(layout.dp * layout.cp, layout.tp)
        case "ep":
            return ProcessGroup(layout.ep, layout.etp)
        case "edp":
            return ProcessGroup(layout.edp, layout.etp * layout.ep)
        case "pp":
            return ProcessGroup(layout.pp, layout.world // layout.pp)
    raise ValueError(f"no axis {axis!r}")


@lru_cache(maxsize=4096)
def group_nodes(size: int, stride: int, per_node: int, count: int) -> tuple[int, int]:
    """How the groups of this kind lie over the nodes: most nodes of one, fewest of its members in a node it touches."""
    most, fewest = 1, size
    last = min(stride, count - (size - 1) * stride) - 1  # a block's last group, which ends before `count`
    for start in {block * size * stride % per_node for block in range(max(1, count // (size * stride)))}:
        for first in {start, start + last}:
            members = Counter((first + i * stride) // per_node for i in range(size))
            most, fewest = max(most, len(members)), min(fewest, *members.values(), size)
    return most, fewest


def collective_seconds(kind: str, nbytes: float, group: ProcessGroup, cluster: Cluster) -> float:
    """Seconds of a collective over a tensor of `nbytes`: the whole of it, for all-to-all one device's part.

    A ring: each of its steps after the first costs a hop, and its slowest level decides how fast the bytes pass. An
    all-reduce over several nodes may take a tree instead, which has fewer steps.
    """
    if group.size == 1 or nbytes == 0:
        return 0.0
    took = max(level_seconds(kind, nbytes, group, cluster))
    nodes, _ = group_nodes(group.size, group.stride, cluster.per_node, cluster.count)
    ring = _ring(PASSES[kind], group.size, nodes, cluster) + took
    if kind != "all_reduce" or nodes == 1:
        return ring
    return min(ring, _tree(group.size, nodes, cluster) + took / TREE)


def concurrent_seconds(kind: str, parts: Sequence[tuple[float, ProcessGroup]], cluster: Cluster) -> float:
    """Seconds of collectives of several groups that are under way at once: each level passes the bytes of all."""
    each = [
        (collective_seconds(kind, nbytes, group, cluster), level_seconds(kind, nbytes, group, cluster))
        for nbytes, group in parts
    ]
    levels = zip_longest(*(levels for took, levels in each if took), fillvalue=0.0)
    waits = max((took - max(levels) for took, levels in each if took), default=0.0)
    return waits + max(map(sum, levels), default=0.0)


def level_seconds(kind: str, nbytes: float, group: ProcessGroup, cluster: Cluster) -> tuple[float, ...]:
    """The seconds for which a collective's bytes take each level of the network, from the node to the farthest crossed.

    What leaves a node or a pod leaves it by the shares of all members there. Of an all-to-all, what stays in the node
    and what leaves it take their own ways at once.
    """
    n, below, out = group.size, 1, []
    wire = PASSES[kind] * nbytes * (n - 1) / n
    for level, (size, speed) in enumerate(cluster.levels):
        boxes, members = group_nodes(n, group.stride, size, cluster.count)
        if kind == "all_to_all":
            carried = nbytes * ((n if level else members) - below) / n
        else:
            carried = wire / below if level or members > 1 else 0.0
        out.append(carried / speed)
        if boxes == 1:
            break
        below = members
    return tuple(out)


def _ring(passes: int, size: int, nodes: int, cluster: Cluster) -> float:
    near, far = cluster.intra, cluster.inter
    steps = passes * (size - 1)
    if nodes == 1:
        return near.latency + (steps - 1) * near.hop
    across = min(passes * nodes, steps)
    return far.latency + across * far.hop + (steps - across) * near.hop


def _tree(size: int, nodes: int, cluster: Cluster) -> float:
    """Up and down: through the node in a chain, and over the nodes in a tree of two branches."""
    near, far = cluster.intra, cluster.inter
    return far.latency + 2 * (log2(nodes) * far.hop + (size / nodes - 1) * near.hop)


def deduplicated_seconds(nbytes: float, copies: int, group: ProcessGroup, cluster: Cluster) -> float:
    """Seconds of an all-to-all of tokens of which so many copies are sent: one to each node, where it is passed on.

    There each device gets one, however many of its experts want it. It is sent to all at once, not around a ring.
    """
    if group.size == 1 or nbytes == 0:
        return 0.0
    n, out = group.size, level_seconds("all_to_all", nbytes, group, cluster)[1:]
    nodes, _ = group_nodes(n, group.stride, cluster.per_node, cluster.count)
    passed = nbytes * (n - 1) / n * _reached(n, copies) / (cluster.intra.reached * KERNELS)
    left = _reached(nodes, copies)
    each = nbytes / nodes * left / NODE_TO_NODE if nodes > 1 else 0.0
    link = cluster.inter if nodes > 1 else cluster.intra
    return MESSAGE_SECONDS + link.latency + link.hop + max(passed, each, *(left * took for took in out))


def _reached(places: int, copies: int) -> float:
    """Places that at least one of a token's copies goes to, as a share of these."""
    return places * (1 - (1 - 1 / places) ** copies) / copies


def sm_share(device: Device) -> float:
    """The share of a device that an exchange takes while others compute.

    Beside an all-to-all over two H200 a product of 8,192 takes 6 % longer, beside an all-gather 11 %, measured for this
    project; these are 12 % of its multiprocessors.
    """
    return CHANNELS / device.units if device.units > CHANNELS else 0.0


def p2p_seconds(nbytes: float, stage: int, layout: Layout, cluster: Cluster, *, scattered: bool = False) -> float:
    """Seconds in which `nbytes` pass from a pipeline stage to the next one, on the worst placed of its devices.

    All devices of the stage send at once; beyond the pod they share what leaves it with no others. scattered: of what
    all tensor-parallel ranks have each sends its part, and they gather them there.
    """
    if layout.pp == 1 or nbytes == 0:
        return 0.0
    if scattered and not layout.sequence_parallel:
        gathered = collective_seconds("all_gather", nbytes, ProcessGroup(layout.tp, 1), cluster)
        return gathered + p2p_seconds(nbytes / layout.tp, stage, layout, cluster)
    stride = layout.world // layout.pp
    a, b = stage % layout.pp * stride, (stage + 1) % layout.pp * stride
    crossed = 0
    for level, (size, _) in enumerate(cluster.levels):
        if any((a + i) // size != (b + i) // size for i in {0, stride - 1}):
            crossed = level + 1
    link = cluster.inter if crossed else cluster.intra
    took = nbytes / link.reached
    if crossed == 2:
        out = cluster.levels[2][1] * cluster.pod
        took = max(took, nbytes * min(stride, cluster.pod) / out)
    return link.latency + took
