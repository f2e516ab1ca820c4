"""A value over two sequences is not sharded over their positions: a device has only its parts of both."""

from __future__ import annotations

from typing import Any

import pytest

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import graph
from megaloom.planner.contract.workload import Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.model.sequence_pairs import sequence_pair
from megaloom.planner.search.search import plan
from tests.support.models.pointer import pointer

WORK = Workload(seq=32, batch=4)


@pytest.mark.parametrize("fixed", [{"cp": 2}, {"tp": 2, "sequence_parallel": True}], ids=["cp", "sequence parallelism"])
def test_pairs_of_positions_are_not_sharded(fixed: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"over both seq and source, .* its parts of them \[sequence-pairs\]"):
        plan(pointer(each=True), cluster("2xH100"), WORK, ref="", fixed=fixed)


def test_other_layouts_are_planned() -> None:
    assert sequence_pair(graph(pointer())) is None
    best = plan(pointer(each=True), cluster("2xH100"), WORK, ref="").best
    assert (best.layout.cp, best.layout.sequence_parallel) == (1, False)
