"""Seconds of collectives and p2p sends, by the links that their process groups cross.

`process_group` gives the devices of an axis, `collective_seconds` the time of a collective there, `p2p_seconds` that of
a send to the next pipeline stage. All groups of an axis work at the same time. A device has its own share of its node's
network (`Cluster.inter` is one device's) and of its pod's, so a group leaves a node on as many shares as it has members
there. Concurrent collectives add up level by level: node, network, beyond the pod.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import zip_longest
from math import comb, log2

import numpy as np
from attrs import frozen

from megaloom.planner.contract.choices import N
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout

from .profiles.groups import ContextCommunication, FrameworkProfile

# How often the whole tensor passes each device's link, less the share that it has already: NCCL's ring algorithms
# (nccl-tests, doc/PERFORMANCE.md).
PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
TREE = 0.92  # of a ring's bandwidth (NCCL, src/graph/tuning.cc)
# Kernels of deduplicated dispatch reach less of NVLink than NCCL does: of its 680 GB/s 570 between 32 GB200 and 627
# between 8, of its 160 136 between 8 H800, without what stays on a device. A device of two nodes of H100 sends 33 GB/s
# to the other, of two nodes of B300, whose links are twice as fast, 29 to 51; of more nodes what its link passes. A
# message announces the destinations first: torch sees 0.04 to 0.12 ms more than the kernel and a copy of its output
# (github.com/deepseek-ai/DeepEP, docs/README_Hybrid-EP.md, 16 multiprocessors, 16 bits; docs/legacy.md; issue 590).
DISPATCH_KERNELS, NODE_TO_NODE, MESSAGE_SECONDS = 0.87, 33e9, 0.08e-3
# Tensors that move as the partial output of one step of ring attention is added to the sum of earlier ones
# (flash_attn_fwd_out_correction), and the share of the queries that it concerns: under a causal mask every second
# step has half of the queries (transformer_engine/pytorch/attention, AttnFuncWithCPAndKVP2P).
CORRECTED_TENSORS, CORRECTED_QUERIES = 3, 3 / 4


PEERS = 8  # of an all-to-all that have channels of their own, as far as was measured: those of a node


@frozen
class ProcessGroup:
    """A group of `size` devices whose ranks are `stride` apart."""

    size: int
    stride: int


def process_group(axis: str, layout: Layout) -> ProcessGroup:
    """Return the process group of an axis, in megatron-core's order of ranks: tp, cp, ep, dp, pp, innermost first.

    "dp" is the group that reduces dense gradients (dp and cp together), "edp" the group that reduces those of experts;
    with several replicas, the innermost part of it, which shares the state of one replica.
    Source: megatron-core 0.16.1, parallel_state.py:562.
    """
    match axis:
        case "tp" | "etp":
            return ProcessGroup(getattr(layout, axis), 1)
        case "cp":
            return ProcessGroup(layout.cp, layout.tp)
        case "dp":
            return ProcessGroup(layout.in_replica(layout.dp * layout.cp), layout.tp)
        case "ep":
            return ProcessGroup(layout.ep, layout.etp)
        case "edp":
            return ProcessGroup(layout.in_replica(layout.edp), layout.etp * layout.ep)
        case "pp":
            return ProcessGroup(layout.pp, layout.world // layout.pp)
    raise ValueError(f"no axis {axis!r}")


@lru_cache(maxsize=4096)
def group_nodes(size: int, stride: int, per_node: int, count: int) -> tuple[int, int]:
    """Return how groups of this size and stride lie on nodes of `per_node` devices, of `count` devices in all.

    First the largest number of nodes that one group touches, then the smallest number of its members on such a node.
    """
    if per_node % (size * stride) == 0:  # each group lies within a node
        return 1, size
    most, fewest = 1, size
    last = min(stride, count - (size - 1) * stride) - 1  # the last group of a block, which ends before `count`
    for start in {block * size * stride % per_node for block in range(max(1, count // (size * stride)))}:
        for first in {start, start + last}:
            nodes = (first + stride * np.arange(size)) // per_node
            members = np.diff(np.flatnonzero(np.diff(nodes, append=-1)), prepend=-1)  # on each of its nodes
            most, fewest = max(most, len(members)), min(fewest, int(members.min()))
    return most, fewest


def state_collective_seconds(kind: str, cluster: Cluster, layout: Layout, *parts: tuple[float, ProcessGroup]) -> float:
    """Return the seconds of a collective over the groups "dp" and "edp" that share state: see `collective_seconds`.

    With several replicas, each device then adds up its part of a reduced tensor with those of the other replicas.
    """
    seconds = collective_seconds(kind, cluster, *parts)
    if layout.replicas > 1 and kind == "reduce_scatter":
        across = ((n / g.size, ProcessGroup(layout.replicas, g.stride * g.size)) for n, g in parts)
        seconds += collective_seconds("all_reduce", cluster, *across)
    return seconds


def collective_seconds(kind: str, cluster: Cluster, *parts: tuple[float, ProcessGroup]) -> float:
    """Return the seconds of a collective over a tensor in each of these groups, at the same time.

    parts: bytes of the tensor (of an all-to-all: of one device's part) and the group. A ring of n devices has
    `PASSES` * (n - 1) steps. Each step after the first costs a link's hop latency, and the slowest level limits the
    bytes per second: each level passes the bytes of all groups. Over several nodes an all-reduce may be a tree: a chain
    inside each node, two branches over the nodes, fewer steps.
    """
    near, far = cluster.intra, cluster.inter
    latency, levels = 0.0, []  # latency: seconds beyond those of the bytes
    for nbytes, group in parts:
        if group.size == 1 or nbytes == 0:
            continue
        levels.append(level_seconds(kind, nbytes, group, cluster))
        took, steps = max(levels[-1]), PASSES[kind] * (group.size - 1)
        nodes, _ = group_nodes(group.size, group.stride, cluster.per_node, cluster.count)
        if nodes == 1:
            waits = near.latency + (steps - 1) * near.hop
        else:
            across = min(PASSES[kind] * nodes, steps)
            waits = far.latency + across * far.hop + (steps - across) * near.hop
        if nodes > 1 and kind == "all_reduce":
            tree = far.latency + 2 * (log2(nodes) * far.hop + (group.size / nodes - 1) * near.hop)
            waits = min(waits, tree + took / TREE - took)
        latency = max(latency, waits)
    if len(levels) == 1:
        return latency + took
    return latency + max(map(sum, zip_longest(*levels, fillvalue=0.0)), default=0.0)


def level_seconds(kind: str, nbytes: float, group: ProcessGroup, cluster: Cluster) -> tuple[float, ...]:
    """Return the seconds for which a collective's bytes occupy each level that it crosses: node, network, beyond.

    Bytes leave a node or a pod by the shares of all members there. The parts of an all-to-all that stay in the node
    and that leave it take different links at the same time.
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


@frozen
class TokenRouting:
    """A router of tokens to experts in equal groups, of which each token has experts in `top_groups` only."""

    copies: int  # of a token, one for each expert
    groups: int = 1
    top_groups: int = 1

    def distinct_share(self, count: int) -> float:
        """Return the expected number of `count` destinations that a token's copies reach, as a share of the copies.

        Each destination has as many consecutive experts. With k copies, G groups, of which T are chosen at random, and
        n destinations, the copies reach each of m destinations alike: m (1 - (1 - 1/m)^k) of them. A group of several
        destinations leaves m = n T / G. A destination of g = G / n groups gets a copy, if j of them are chosen, with
        probability 1 - (1 - j/T)^k; j is hypergeometric.
        """
        k, groups, top = self.copies, self.groups, self.top_groups
        if groups % count == 0 and groups > count:
            each = groups // count
            chosen = (comb(each, j) * comb(groups - each, top - j) * (1 - (1 - j / top) ** k) for j in range(top + 1))
            return count * sum(chosen) / comb(groups, top) / k
        reached = count * top // groups if count % groups == 0 else count
        return reached * (1 - (1 - 1 / reached) ** k) / k


def deduplicated_seconds(nbytes: float, routing: TokenRouting, group: ProcessGroup, cluster: Cluster) -> float:
    """Return the seconds of a deduplicated dispatch of tokens to their experts.

    A token goes once to each node that has one of its experts, and once to each device there. Sends to all devices run
    at the same time, not around a ring.
    """
    if group.size == 1 or nbytes == 0:
        return 0.0
    n, levels = group.size, level_seconds("all_to_all", nbytes, group, cluster)[1:]
    nodes, _ = group_nodes(n, group.stride, cluster.per_node, cluster.count)
    received = nbytes * (n - 1) / n * routing.distinct_share(n) / (cluster.intra.reached * DISPATCH_KERNELS)
    share = routing.distinct_share(nodes)
    sent = nbytes / nodes * share / NODE_TO_NODE if nodes > 1 else 0.0
    link = cluster.inter if nodes > 1 else cluster.intra
    return MESSAGE_SECONDS + link.latency + link.hop + max(received, sent, *(share * took for took in levels))


@frozen
class AttentionExchange:
    """The exchange of keys and values of one pass of attention over a sharded sequence."""

    kind: str  # of the collective, as the facts count it
    nbytes: float  # of keys and values
    queries: float  # bytes of a device's queries
    compute: float  # seconds of attention in this pass
    backward: bool


def context_parallel_seconds(
    way: ContextCommunication, exchange: AttentionExchange, group: ProcessGroup, cluster: Cluster
) -> float:
    """Return the exposed seconds of an exchange of attention over a sharded sequence.

    - all-gather: `kind` as the facts count it, before attention begins. Our runtime does that.
    - all-to-all: queries, keys and values exchange parts of the sequence for parts of the heads, and the output
      returns (DeepSpeed-Ulysses, arXiv:2309.14509).
    - p2p: keys and values, and backward also their gradients, go around a ring while attention computes with the part
      that has arrived. Kernels add up the parts of the output (megatron-core's default; see CORRECTED_TENSORS).
    """
    nbytes, queries, backward = exchange.nbytes, exchange.queries, exchange.backward
    if way is ContextCommunication.ALL_GATHER:
        return collective_seconds(exchange.kind, cluster, (nbytes, group))
    if way is ContextCommunication.ALL_TO_ALL:
        heads = collective_seconds("all_to_all", cluster, (queries + nbytes / group.size, group))
        return heads + collective_seconds("all_to_all", cluster, (queries, group))
    ring = collective_seconds("all_gather", cluster, ((2 if backward else 1) * nbytes, group))
    corrected = CORRECTED_QUERIES * group.size * queries + (nbytes if backward else 0)
    hidden = exchange.compute * (group.size - 1) / group.size
    return CORRECTED_TENSORS * corrected / cluster.device.moves + max(0.0, ring - hidden)


def p2p_seconds(nbytes: float, stage: int, layout: Layout, cluster: Cluster, *, scattered: bool = False) -> float:
    """Return the seconds of a p2p send of `nbytes` from a pipeline stage to the next one, on its slowest device."""
    return send_seconds(nbytes, crossed_level(stage % layout.pp, layout, cluster), layout, cluster, scattered=scattered)


def crossed_level(rank: N, layout: Layout, cluster: Cluster) -> N:
    """Return the network level that a send from a pipeline rank to the next one crosses: 0 node, 1 pod, 2 beyond.

    Ranks are a number or an array. Levels are nested.
    """
    stride, crossed = layout.world // layout.pp, 0 * rank
    sender, receiver = rank * stride, (rank + 1) % layout.pp * stride
    for size, _ in cluster.levels:
        first, last = (
            sender // size != receiver // size,
            (sender + stride - 1) // size != (receiver + stride - 1) // size,
        )
        crossed = crossed + (first | last)
    return crossed


def send_seconds(nbytes: float, crossed: int, layout: Layout, cluster: Cluster, *, scattered: bool = False) -> float:
    """Return the seconds of a p2p send of `nbytes` that crosses a network level, see `crossed_level`.

    All devices of the stage send at the same time; beyond the pod they share the links of the pod. scattered: each
    tensor-parallel rank sends its part of what all have, and the receivers gather the parts.
    """
    if layout.pp == 1 or nbytes == 0:
        return 0.0
    if scattered and not layout.sequence_parallel:
        gathered = collective_seconds("all_gather", cluster, (nbytes, ProcessGroup(layout.tp, 1)))
        return gathered + send_seconds(nbytes / layout.tp, crossed, layout, cluster)
    link = cluster.inter if crossed else cluster.intra
    took = nbytes / link.reached
    if crossed == 2:
        out = cluster.levels[2][1] * cluster.pod
        took = max(took, nbytes * min(layout.world // layout.pp, cluster.pod) / out)
    return link.latency + took


def reserved_bytes(layout: Layout, cluster: Cluster, profile: FrameworkProfile) -> int:
    """Return the bytes that no tensor holds: the CUDA context, and the buffers of communicators.

    Each axis of more than one device has a communicator; an all-to-all has channels for each pair of devices. Those of
    `Partition.copy_groups` come on top.
    """
    link = cluster.outer
    peers = 0 if profile.experts.deduplicated_dispatch else min(layout.ep, PEERS) - 1
    dp, edp = layout.in_replica(layout.dp * layout.cp), layout.in_replica(layout.edp) * (layout.ep * layout.etp > 1)
    sizes = layout.tp, layout.cp, dp, layout.pp, layout.ep, layout.etp, edp, layout.replicas
    groups = sum(size > 1 for size in sizes)
    return cluster.device.context_nbytes + groups * link.group_nbytes + link.peer_nbytes * peers
