"""A rule that is written once binds the search, `plan --lint` and training."""

from __future__ import annotations

from typing import Any

import pytest

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import graph
from megaloom.examples.llama3 import llama
from megaloom.planner.contract.choices import Module, Overlap, Recompute, Shard
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Layouts
from megaloom.planner.contract.plans import PlanError
from megaloom.planner.contract.workload import Runtime, Workload
from megaloom.planner.cost.profiles.frameworks import PROFILES
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.report.lint import violations_text
from megaloom.planner.rules import export_rules, rules
from megaloom.planner.rules.fsdp import OWN_GRADIENTS
from megaloom.planner.rules.plan_check import check_plan
from megaloom.planner.rules.rule import Case, Condition, Owner, Rule, fields_read, violated
from megaloom.planner.search.candidate_space import KEPT_BY_CHOICES, KEPT_WITH_ONE_SHARD, VARIANT_FIELDS
from megaloom.planner.search.candidates import Candidates
from megaloom.planner.search.device_meshes import TIE_RATIO
from megaloom.planner.search.infeasible import checked_fixed
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.search.search import Found, plan
from megaloom.planner.search.variant_choices import chunk_counts

MODEL = llama("tiny-llama", layers=8, heads=4, kv_heads=2, embed=64, ff=96, vocab=512)
WORK, MACHINE = Workload(seq=64, batch=24), cluster("4xH100")


def site_rule(holds: Condition) -> Rule:
    return Rule(
        id="site",
        sentence="It is a rule of this site.",
        fix="ask the site",
        owner=Owner.PLANNER,
        source="the site",
        holds=holds,
        explain=lambda case: ("this site has a rule", "ask the site"),
    )


def planned(**fixed: Any) -> Found:
    return plan(MODEL, MACHINE, WORK, ref="tests:model", fixed=fixed)


def layouts(found: Found) -> list[Layout]:
    return [p.layout for p in (found.best, *found.others, *found.variants)]


Fields = dict[str, Any]
# Fixed fields, others with which a layout breaks the rule, others with which one keeps it, and the rule.
SITE_RULES: list[tuple[Fields, Fields, Fields, Condition]] = [
    ({"pp": 2}, {"vpp": 4}, {"vpp": 2}, lambda case: case.layout.vpp <= 2),
    ({"pp": 2}, {"vpp": 1}, {"vpp": 2}, lambda case: (case.layout.pp == 1) | (case.layout.vpp > 1)),
    (
        {"pp": 2, "vpp": 2},
        {"microbatch_group": 3},
        {"microbatch_group": 0},
        lambda case: case.layout.microbatch_group_size % 2 == 0,
    ),
    (
        {"pp": 2, "vpp": 2},
        {"microbatch_group": 0},
        {"microbatch_group": 4},
        lambda case: case.layout.microbatch_group > case.layout.pp,
    ),
    ({}, {"recompute": "none"}, {"recompute": "full"}, lambda case: case.layout.recompute == Recompute.FULL),
    (
        {"pp": 2},
        {"recompute": "full"},
        {"recompute": "none"},
        lambda case: (case.layout.dp == 1) | (case.layout.recompute != Recompute.FULL),
    ),
    (
        {"recompute": "full"},
        {"recompute_layers": 1},
        {"recompute_layers": 0},
        lambda case: case.layout.recompute_layers == 0,
    ),
    (
        {"recompute": "selective"},
        {"recompute_modules": ["layernorm"]},
        {"recompute_modules": ["core_attn"]},
        lambda case: case.layout.recomputed_module_bits & (Module.LAYERNORM.bit | Module.MLP.bit) == 0,
    ),
    (
        {"pp": 2},
        {"shard": "none"},
        {"shard": "optimizer"},
        lambda case: (case.layout.dp == 1) | (case.layout.shard == Shard.OPTIMIZER),
    ),
]


@pytest.mark.parametrize(("fixed", "breaks", "keeps", "holds"), SITE_RULES)
def test_a_rule_binds_the_search_lint_and_training(
    fixed: Fields, breaks: Fields, keeps: Fields, holds: Condition, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(x: Layout) -> bool:
        return bool(violated([rule], Case(x, graph(MODEL), WORK, MACHINE)))

    def count() -> int:
        return Candidates(Pricer(graph(MODEL), MACHINE, WORK), checked_fixed(fixed)).count

    rule = site_rule(holds)
    before, count_before = planned(**fixed), count()
    illegal, legal = planned(**fixed | breaks).best, planned(**fixed | keeps).fastest
    assert broken(illegal.layout)
    assert not broken(legal.layout)
    assert any(broken(x) for x in layouts(before))
    monkeypatch.setattr(rules, "RULES", (*rules.RULES, rule))

    after = planned(**fixed)
    assert not any(broken(x) for x in layouts(after))
    assert after.fastest.predicted.step_seconds <= TIE_RATIO * legal.predicted.step_seconds
    assert 0 < count() < count_before
    given = {**fixed, **breaks, "dp": illegal.layout.dp, "tp": illegal.layout.tp, "cp": illegal.layout.cp}
    with pytest.raises(UserError, match=r"this site has a rule \[site\]"):
        planned(**given)
    assert "this site has a rule [site]" in violations_text(graph(MODEL), MACHINE, WORK, checked_fixed(given))
    check_plan(after.best, MODEL)
    with pytest.raises(PlanError, match=r"this site has a rule \[site\]"):
        check_plan(illegal, MODEL)


def test_a_rule_of_exports_binds_plans_for_other_programs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def counts() -> list[int]:
        pricers = (Pricer(graph(MODEL), MACHINE, WORK, PROFILES[x]) for x in (Runtime.MEGALOOM, Runtime.MEGATRON))
        return [Candidates(pricer, {"pp": 2, "vpp": 4}).count for pricer in pricers]

    before = counts()
    monkeypatch.setattr(export_rules, "EXPORT_RULES", (site_rule(lambda case: case.layout.vpp <= 2),))
    assert before[1] > 0
    assert counts() == [before[0], 0]


def test_the_rules_of_today_are_not_asked_again_about_variants() -> None:
    """Else a search takes longer: what they forbid is not among the choices."""
    every = {rule.id: rule for rule in (*rules.RANGE_RULES, *rules.RULES, *export_rules.EXPORT_RULES, OWN_GRADIENTS)}
    case = Case(Layouts.of([Layout()]), graph(MODEL), WORK, MACHINE)
    read = {name for name, rule in every.items() if fields_read(rule, case).intersection(VARIANT_FIELDS)}
    assert read == KEPT_BY_CHOICES | KEPT_WITH_ONE_SHARD


def test_the_fields_that_a_rule_reads() -> None:
    case = Case(Layouts.of([Layout()]), graph(MODEL), WORK, MACHINE)
    for holds, names in (
        (lambda case: case.layout.tp <= case.cluster.per_node, {"tp"}),
        (lambda case: case.layout.microbatches(case.workload.batch) > 1, {"dp", "micro_batch"}),
        (lambda case: case.layout.has_overlap(Overlap.TENSOR) == 0, {"overlaps"}),
        (lambda case: case.workload.batch > 1, set[str]()),
    ):
        assert fields_read(site_rule(holds), case) == names


@pytest.mark.parametrize(
    ("pp", "blocks", "stages", "chunks"),
    [
        (1, 32, 65, (1,)),
        (2, 32, 65, (1, 2, 4, 8, 16)),
        (4, 80, 161, (1, 2, 4, 5, 8, 10, 16)),  # 8 and 16 do not divide a rank's 20 blocks
        (2, 61, 122, (1, 2, 4, 8, 16)),  # DeepSeek-V3 on two ranks
        (4, 8, 17, (1, 2, 4)),
        (2, 0, 7, (1, 2, 3)),  # a model without repeated blocks
        (8, 0, 7, (1,)),
    ],
)
def test_chunk_counts(pp: int, blocks: int, stages: int, chunks: tuple[int, ...]) -> None:
    assert chunk_counts(pp, blocks, stages) == chunks
