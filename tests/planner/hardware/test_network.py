"""The levels of a network: nodes, pods and what joins these; who shares what leaves them."""

from __future__ import annotations

import math
from random import Random

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from megaloom.dsl.graph import graph
from megaloom.examples.llama3 import llama3_8b
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.cost import communication
from megaloom.planner.cost.columns import CostColumn
from megaloom.planner.cost.communication import PASSES, ProcessGroup, TokenRouting
from megaloom.planner.cost.profiles.frameworks import MEGATRON
from megaloom.planner.cost.profiles.groups import ContextCommunication
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.search.pricing import Pricer
from tests.support.profiles import changed

FLAT = cluster("512xH100")
KIND = st.sampled_from(sorted(PASSES))


def pods(pod: int, times: float) -> Cluster:
    return evolve(FLAT, pod=pod, oversubscription=times)


@given(KIND, st.integers(1, 1 << 34), st.sampled_from([2, 4, 8, 32, 128, 512]), st.sampled_from([1, 2, 8, 64]))
def test_pods_that_are_not_short_of_links_cost_nothing(kind: str, nbytes: int, size: int, stride: int) -> None:
    group = ProcessGroup(size, min(stride, 512 // size))
    flat = communication.collective_seconds(kind, FLAT, (nbytes, group))
    assert communication.collective_seconds(kind, pods(64, 1), (nbytes, group)) == pytest.approx(flat)
    assert communication.collective_seconds(kind, pods(512, 7), (nbytes, group)) == flat
    assert communication.collective_seconds(kind, pods(64, 7), (nbytes, group)) >= flat * (1 - 1e-9)


@pytest.mark.parametrize(("stride", "nodes"), [(1, 8), (8, 8), (64, 1)])
def test_a_ring_leaves_a_pod_by_the_shares_of_its_members_there(stride: int, nodes: int) -> None:
    """Oversubscription costs a ring something only if it is more than the nodes that the ring has in a pod."""
    group = ProcessGroup(512 // stride, stride)
    flat = communication.level_seconds("all_reduce", 1e9, group, FLAT)
    for times in (2, 8, 32):
        result = communication.level_seconds("all_reduce", 1e9, group, pods(64, times))
        assert max(result) == pytest.approx(max(max(flat), flat[-1] * times / nodes))


def test_an_all_to_all_passes_what_leaves_the_pod() -> None:
    group, speed = ProcessGroup(512, 1), FLAT.inter.reached
    node, pod, beyond = communication.level_seconds("all_to_all", 512e6, group, pods(64, 4))
    assert node == pytest.approx(7e6 / FLAT.intra.reached)
    assert pod == pytest.approx(504e6 / speed)
    assert beyond == pytest.approx(4 * 448e6 / speed)


def test_pipeline_stages_share_what_leaves_the_pod() -> None:
    for pp, short in ((2, True), (8, True), (64, False)):  # 256, 64 and 8 devices send at once, of a pod of 64
        layout = Layout(dp=64 // pp, tp=8, pp=pp)
        last = 64 // (512 // pp) - 1 if pp > 8 else 0  # the last stage of the first pod
        took = communication.p2p_seconds(1e9, last, layout, pods(64, 4))
        flat = communication.p2p_seconds(1e9, last, layout, FLAT)
        link = FLAT.inter.latency
        assert took - link == pytest.approx((4 if short else 1) * (flat - link))


def test_small_all_reduces_take_a_tree() -> None:
    """The norm of the gradient over 16,384 devices takes milliseconds, not the 0.4 s of a ring's steps."""
    many = cluster("16384xH100")
    took = communication.collective_seconds("all_reduce", many, (4, ProcessGroup(16384, 1)))
    hops = 2 * (math.log2(2048) * many.inter.hop + 7 * many.intra.hop)
    assert took == pytest.approx(many.inter.latency + hops, rel=1e-3)


def test_a_group_within_a_node_takes_no_network() -> None:
    """Such as the first and the last pipeline rank, which share a weight."""
    near = cluster("8xH100")
    slow = evolve(near, inter=evolve(near.inter, bandwidth=1e6))
    for group in (ProcessGroup(2, 7), ProcessGroup(2, 4), ProcessGroup(3, 3)):
        assert communication.group_nodes(group.size, group.stride, 8, 8) == (1, group.size)
        seconds = {communication.collective_seconds("all_reduce", x, (1e8, group)) for x in (slow, near)}
        assert len(seconds) == 1


def test_what_two_axes_exchange_at_once_adds_up_level_by_level() -> None:
    near, far = ProcessGroup(8, 1), ProcessGroup(64, 8)
    for parts in ([(1e9, near)], [(1e9, far)], [(1e9, near), (1e7, far)], [(1e9, far), (2e9, far)], []):
        each = [communication.collective_seconds("reduce_scatter", FLAT, (n, group)) for n, group in parts]
        assert (
            max(each, default=0.0)
            <= communication.collective_seconds("reduce_scatter", FLAT, *parts)
            <= sum(each) * (1 + 1e-9)
        )
    both = [(1e9, near), (1e8, far)]  # the one takes the node's links, the other the network
    each = [communication.collective_seconds("reduce_scatter", FLAT, (n, group)) for n, group in both]
    assert communication.collective_seconds("reduce_scatter", FLAT, *both) < 0.7 * sum(each)


@pytest.mark.parametrize(
    ("gpu", "size", "kernel", "call"),
    [
        ("H100", 16, (71.7, 63.0), (54.5, 53.4)),
        ("H100", 32, (57.7, 57.5), (47.4, 52.5)),
        ("H100", 64, (50.0, 49.8), (41.2, 46.6)),
        ("GB200", 8, (750, 684), (550, 538)),
        ("GB200", 16, (662, 601), (473, 474)),
        ("GB200", 32, (630, 547), (486, 423)),
        ("GB200", 36, (613, 543), (470, 418)),
    ],
)
def test_tokens_sent_once_take_as_long_as_measured(
    gpu: str, size: int, kernel: tuple[float, float], call: tuple[float, float]
) -> None:
    """GB/s of what each node gets, or each device of one, there and back: HybridEP's tables. A call copies it too."""
    token, copies, many = 4096 * 7168 * 2, 8, cluster(f"{size}x{gpu}")
    expected_copies = [n * (1 - (1 - 1 / n) ** copies) for n in (size, many.nodes)]
    got = token * expected_copies[many.nodes > 1]
    took = communication.deduplicated_seconds(copies * token, TokenRouting(copies), ProcessGroup(size, 1), many)
    assert got / (took - communication.MESSAGE_SECONDS) / 1e9 == pytest.approx(sum(kernel) / 2, rel=0.1)
    assert got / (took + 2 * token * expected_copies[0] / many.device.moves) / 1e9 == pytest.approx(
        sum(call) / 2, rel=0.15
    )


@given(st.integers(1, 1 << 32), st.integers(1, 16), st.sampled_from([2, 8, 16, 64, 512]))
def test_copies_for_one_node_are_sent_once(nbytes: int, copies: int, size: int) -> None:
    group = ProcessGroup(size, 1)
    routing = TokenRouting(copies)
    took = communication.deduplicated_seconds(nbytes, routing, group, FLAT)
    assert took <= communication.deduplicated_seconds(nbytes, TokenRouting(1), group, FLAT) * (1 + 1e-9)
    assert took < communication.deduplicated_seconds(copies * nbytes, routing, group, FLAT) or copies == 1
    assert communication.deduplicated_seconds(nbytes, routing, ProcessGroup(1, 1), FLAT) == 0


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 32])
def test_tokens_reach_as_many_destinations_as_a_simulated_router_chooses(count: int) -> None:
    """A router of DeepSeek-V3: 8 experts, with repeats, of the 256 / 8 in each of 4 random groups of 8."""
    random, routing = Random(0), TokenRouting(8, groups=8, top_groups=4)
    reached = 0
    for _ in range(tokens := 4000):
        chosen = random.sample(range(8), 4)
        reached += len({(32 * random.choice(chosen) + random.randrange(32)) * count // 256 for _ in range(8)})
    assert 8 * routing.distinct_share(count) == pytest.approx(reached / tokens, rel=0.02)
    assert routing.distinct_share(count) <= TokenRouting(8).distinct_share(count)
    assert count == 1 or 8 * routing.distinct_share(count) <= count


@pytest.mark.parametrize("seq", [2048, 32768])
def test_ways_of_context_parallelism(seq: int) -> None:
    """A ring hides behind attention when sequences are long, but for what adds its parts up."""
    layout, g = Layout(dp=1, tp=2, cp=4), graph(llama3_8b())
    seen = {}
    for kind in ContextCommunication:
        book = Pricer(
            g,
            cluster("8xH100"),
            Workload(seq=seq, batch=8),
            changed(MEGATRON, attention={"context_communication": kind}),
        )
        total = book.structure.kind_counts @ book.cost_table(layout).rows
        seen[kind] = float(total[CostColumn.CP_FORWARD]), float(total[CostColumn.CP_BACKWARD])
    tokens, kv, heads = seq // 4, 8 * 128 // 2, 32 * 128 // 2  # of each device
    sums = [
        3 * 2 * tokens * 4 * moved / cluster("8xH100").device.moves for moved in (0.75 * heads, 0.75 * heads + 2 * kv)
    ]
    assert 32 * sums[0] <= seen[ContextCommunication.P2P][0] < seen[ContextCommunication.ALL_GATHER][0] + 32 * sums[0]
    if seq == 32768:
        assert seen[ContextCommunication.P2P] == pytest.approx(tuple(32 * took for took in sums))
    sent = 2 * tokens * (heads + 2 * kv)
    there = communication.collective_seconds("all_to_all", cluster("8xH100"), (sent, ProcessGroup(4, 2)))
    back = communication.collective_seconds("all_to_all", cluster("8xH100"), (2 * tokens * heads, ProcessGroup(4, 2)))
    assert seen[ContextCommunication.ALL_TO_ALL] == pytest.approx((32 * (there + back),) * 2)
    gathered = communication.collective_seconds("all_gather", cluster("8xH100"), (2 * seq * 2 * kv, ProcessGroup(4, 2)))
    assert seen[ContextCommunication.ALL_GATHER][0] == pytest.approx(32 * gathered)


def test_scattered_each_rank_sends_its_part() -> None:
    machine, x = cluster("64xA100"), Layout(dp=4, tp=8, pp=2)
    whole, parts = (communication.p2p_seconds(1e9, 0, x, machine, scattered=some) for some in (False, True))
    gathered = communication.collective_seconds("all_gather", machine, (1e9, ProcessGroup(8, 1)))
    assert parts == pytest.approx(gathered + communication.p2p_seconds(1e9 / 8, 0, x, machine)) and parts < whole / 4
    divided = evolve(x, sequence_parallel=True)  # has a part of it
    assert communication.p2p_seconds(1e9, 0, divided, machine, scattered=True) == communication.p2p_seconds(
        1e9, 0, divided, machine
    )
