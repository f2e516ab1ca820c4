"""Each suggested change is legal together with everything else that is fixed."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megaloom.dsl.graph import graph
from megaloom.examples.gpt2 import gpt
from megaloom.examples.mixtral import mixtral
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.rules.rules import range_violations, violations
from megaloom.planner.search.candidate_space import CandidateSpace
from megaloom.planner.search.candidates import Candidates
from megaloom.planner.search.infeasible import checked_fixed, nothing_legal
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.search.suggestions import legal_changes

DENSE = graph(gpt("tiny-gpt", layers=6, heads=4, embed=64, vocab=512, seq=64))
SPARSE = graph(mixtral("tiny-mixtral", layers=4, heads=8, kv_heads=4, embed=128, ff=256, experts=4, vocab=512))
VALUES: dict[str, list[Any]] = {
    "tp": [1, 2, 3, 4, 8],
    "pp": [1, 2, 3, 4],
    "cp": [1, 2, 3],
    "dp": [1, 2, 4, 5, 8],
    "ep": [1, 2, 3, 4],
    "vpp": [1, 2, 3],
    "microbatch_group": [0, 2, 3, 5],
    "micro_batch": [1, 2, 3, 5],
    "recompute": ["none", "selective", "full"],
    "sequence_parallel": [False, True],
}


@settings(max_examples=40)
@given(st.data(), st.sampled_from([DENSE, SPARSE]), st.sampled_from([4, 6, 8]), st.sampled_from([8, 12, 24]))
def test_suggested_values_are_legal_with_all_other_fixed_fields(
    data: st.DataObject, g: Any, count: int, batch: int
) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=2, max_size=5, unique=True))
    fixed = checked_fixed({name: data.draw(st.sampled_from(VALUES[name])) for name in names})
    devices, work = cluster(f"{count}xH100" if count != 6 else "6xCPU"), Workload(seq=48, batch=batch)
    assume(not range_violations(Layout(**fixed), g, work, devices))
    pricer = Pricer(g, devices, work)
    if Candidates(pricer, fixed).count:
        return
    for change in legal_changes(pricer.space(fixed)):
        assert set(change) <= set(fixed) and all(fixed[name] != value for name, value in change.items())
        candidates = Candidates(pricer, {**fixed, **change})
        assert candidates.count
        result = candidates.bound_all() and candidates.variants(candidates.numbers[:1] * 0)
        assert not any(violations(result.layouts[i], g, work, devices) for i in range(len(result)))
    assert nothing_legal(pricer, fixed)


def test_vpp_1_is_not_suggested_with_a_fixed_microbatch_group() -> None:
    """A microbatch group needs interleaving."""
    fixed = checked_fixed({"microbatch_group": 5, "pp": 4, "vpp": 2})
    changes = legal_changes(CandidateSpace(DENSE, cluster("4xH100"), Workload(seq=48, batch=8), fixed))
    assert changes
    assert all(change.get("vpp") != 1 for change in changes if "microbatch_group" not in change)
