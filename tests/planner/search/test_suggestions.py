"""Each suggested change is legal together with everything else that is fixed."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megaloom.dsl.graph import graph
from megaloom.examples.gpt2 import gpt
from megaloom.examples.mixtral import mixtral
from megaloom.planner.contract.layout import FIELDS, Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.report.lint import violations_text
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


LINTED = sorted(VALUES.keys() - {"recompute"})


@settings(max_examples=40)
@given(st.data(), st.sampled_from([DENSE, SPARSE]), st.sampled_from([8, 12, 24]))
def test_advice_of_lint_changes_the_layout_to_a_legal_one(data: st.DataObject, g: Any, batch: int) -> None:
    names = data.draw(st.lists(st.sampled_from(LINTED), min_size=1, max_size=4, unique=True))
    fixed = checked_fixed({name: data.draw(st.sampled_from(VALUES[name])) for name in names})
    devices, work = cluster("8xH100"), Workload(seq=48, batch=batch)
    flags = {field.flag: name for name, field in FIELDS.items()}
    for line in violations_text(g, devices, work, fixed).splitlines():
        if line.startswith("use --") and " instead of " in line:
            new, old = (words.split() for words in line.removeprefix("use ").split(" instead of "))
            if "sequence-parallel" not in line:  # this flag has no value
                assert all(
                    pair not in zip(old[::2], old[1::2], strict=True) for pair in zip(new[::2], new[1::2], strict=True)
                )
                change = {flags[flag]: int(value) for flag, value in zip(new[::2], new[1::2], strict=True)}
                assert not violations_text(g, devices, work, fixed | change), line


def test_lint_says_which_degree_fills_the_devices() -> None:
    said = violations_text(DENSE, cluster("16xH100"), Workload(seq=48, batch=16), {"tp": 2, "pp": 2, "dp": 2})
    changes = [
        "--tp 4 instead of --tp 2",
        "--pp 4 instead of --pp 2",
        "--dp 4 instead of --dp 2",
        "--cp 2 instead of --cp 1",
    ]
    assert said.endswith("\n".join(f"use {change}" for change in changes)), said


def test_vpp_1_is_not_suggested_with_a_fixed_microbatch_group() -> None:
    """A microbatch group needs interleaving."""
    fixed = checked_fixed({"microbatch_group": 5, "pp": 4, "vpp": 2})
    changes = legal_changes(CandidateSpace(DENSE, cluster("4xH100"), Workload(seq=48, batch=8), fixed))
    assert changes
    assert all(change.get("vpp") != 1 for change in changes if "microbatch_group" not in change)
