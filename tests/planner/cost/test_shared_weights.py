"""Shared weights in plans: one copy on each pipeline rank that uses a weight, and an all-reduce of its gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaloom.dsl import Graph, graph
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.cost import communication
from megaloom.planner.cost.communication import ProcessGroup
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.partition.partitioner import Partition
from megaloom.planner.rules.shared_weights import shared_weight_users
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.simulate.price import end_of_rank
from tests.support.models.shared_weights import albert, albert_blocks, positions_again, tiny_t5

WORK = Workload(seq=32, batch=8)
GRAPHS = [graph(make()) for make in (albert, albert_blocks, positions_again, tiny_t5)]
PARALLEL = [(2, 1), (4, 1), (2, 2), (3, 2)]


def ranks_of(g: Graph, bounds: tuple[int, ...], pp: int) -> dict[str, set[int]]:
    """Return the pipeline ranks that use each trained weight."""
    out: dict[str, set[int]] = {}
    for i, (start, stop) in enumerate(pairwise(bounds)):
        for s in (s for n in g.nodes[start:stop] for s in n.weights if s.trained):
            out.setdefault(s.name, set()).add(i % pp)
    return out


def elements(g: Graph, name: str) -> int:
    size = 1
    for d in g.weights[name].dims:
        size *= d.known
    return size


@settings(max_examples=12)
@given(st.sampled_from(GRAPHS), st.sampled_from(PARALLEL), st.data())
def test_a_rank_holds_each_weight_once_and_reduces_those_that_others_hold(
    g: Graph, parallel: tuple[int, int], data: st.DataObject
) -> None:
    pp, vpp = parallel
    pricer = Pricer(g, cluster(f"{pp}xH100"), WORK)
    layout = Layout(pp=pp, vpp=vpp, vocab_multiple=1)
    cuts = data.draw(st.lists(st.sampled_from(g.cut_points), unique=True, min_size=pp * vpp - 1, max_size=pp * vpp - 1))
    placed = Partition(pricer.partition(layout).problem, (0, *sorted(cuts), len(g.nodes)))
    users = ranks_of(g, placed.bounds, pp)
    for rank in range(pp):
        own = [name for name, ranks in users.items() if rank in ranks]
        planned = sum(s.params + s.expert_params for s in placed.stages[rank::pp])
        assert planned == sum(elements(g, name) for name in own)
        expected = 0.0
        for name in own:
            ranks = users[name]
            if len(ranks) > 1 and name in shared_weight_users(g):
                group = ProcessGroup(len(ranks), (max(ranks) - min(ranks)) // (len(ranks) - 1))
                nbytes = placed.problem.job.profile.optimizer.gradient_nbytes * elements(g, name)
                expected += communication.collective_seconds("all_reduce", pricer.cluster, (nbytes, group))
        assert end_of_rank(placed, rank).tied == pytest.approx(expected, rel=1e-9)
        shared = {frozenset(users[name]) for name in own if name in shared_weight_users(g)}
        groups = sum(1 < len(ranks) < pp for ranks in shared)  # the group of pp is there already
        usual = communication.reserved_bytes(layout, pricer.cluster, placed.problem.job.profile)
        buffers = groups * pricer.cluster.intra.group_nbytes
        assert placed.rank_peaks[rank].held["runtime"] == usual + buffers
