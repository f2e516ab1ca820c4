"""Costs of the stages of many layouts at once are those of each layout's cost table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaloom.dsl.catalog import find
from megaloom.dsl.graph import graph
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Layouts
from megaloom.planner.contract.workload import Workload
from megaloom.planner.cost.columns import FORWARD_COLUMNS, STATE_COLUMNS, STEP_COLUMNS, CostColumn
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.partition.chain_costs import SECONDS
from megaloom.planner.partition.partitioner import PartitionProblem
from megaloom.planner.search.pricing import Pricer

RECOMPUTE = (("none", 0), ("selective", 0), ("full", 0), ("full", 1), ("full", 2), ("full", 5))
PRICER = Pricer(graph(find("mixtral-8x7b")[0]), cluster("16xH100"), Workload(seq=512, batch=64))


def layouts(shard: str) -> list[Layout]:
    """Layouts whose cost tables differ, some of them in recomputed blocks only."""
    shapes = [{"tp": tp, "ep": ep, "micro_batch": size} for tp, ep, size in ((1, 1, 1), (2, 1, 1), (1, 2, 3))]
    modes = [{"recompute": mode, "recompute_layers": count} for mode, count in RECOMPUTE]
    return [Layout(dp=16 // shape["tp"], shard=shard, **shape, **mode) for shape in shapes for mode in modes]


@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_seconds_of_chains_equal_those_of_a_layout_alone(shard: str) -> None:
    costs = PRICER.chain_costs(Layouts.of(layouts(shard)))
    assert len(costs.tables) < len(costs.table)  # those that differ in recomputed blocks share a table
    for i, x in enumerate(layouts(shard)):
        mine = costs.seconds(np.array([i]))
        alone = PartitionProblem(x, PRICER.cost_table(x), PRICER.capacity).seconds.alone
        for name in ("sums", "extra", "extra_end", "last"):
            assert np.array_equal(getattr(mine, name), getattr(alone, name)), (x, name)


def test_farthest_ends_are_those_of_each_chain() -> None:
    every = layouts("optimizer")
    costs, which = PRICER.chain_costs(Layouts.of(every)), np.arange(len(every))
    caps = costs.before[SECONDS, costs.table, -1] / np.arange(1, len(every) + 1)
    for i, far in enumerate(costs.farthest(which, caps)):
        alone = PartitionProblem(every[i], PRICER.cost_table(every[i]), PRICER.capacity).seconds
        assert far.tolist() == alone.farthest(float(caps[i])).tolist(), every[i]


@given(st.sets(st.integers(1, 60), min_size=3, max_size=3))
def test_costs_of_stages_are_those_of_the_cost_table(inner: set[int]) -> None:
    every = layouts("optimizer")
    costs, cuts = PRICER.chain_costs(Layouts.of(every)), PRICER.structure.cut_points
    bounds = np.array([[0, *sorted(inner), len(cuts) - 1]] * len(every))
    columns = (STEP_COLUMNS, FORWARD_COLUMNS, [CostColumn.SAVED], *([column] for column in STATE_COLUMNS))
    sums = costs.stages(np.arange(len(every)), bounds[:, :-1], bounds[:, 1:])
    for i, x in enumerate(every):
        alone = PRICER.cost_table(x).stage_sums(cuts[bounds[i]].tolist())
        expected = [alone[:, each].sum(axis=1) for each in columns]
        np.testing.assert_allclose(sums[:, i], expected, rtol=1e-9, err_msg=str(x))
    table = PRICER.cost_table(every[0])
    assert costs.transient[:, 0].tolist() == [table.least_boundary, table.workspace, table.library]
