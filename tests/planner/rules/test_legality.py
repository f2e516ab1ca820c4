"""The rules agree with megatron-core on random layouts, and published layouts are legal.

`python benchmarks/legality.py 10000` asks about as many layouts as one likes.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from megaloom.dsl.catalog import find
from megaloom.dsl.graph import graph
from megaloom.planner.cli.main import main
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.rules.expert_shard import EXPERT_SHARD_RULES
from megaloom.planner.rules.fsdp import FSDP_RULES
from megaloom.planner.rules.rule import Owner
from megaloom.planner.rules.rules import RULES, violations
from megaloom.runtime.launch import launcher
from tests.support.legality.comparison import (
    CORE_ALONE,
    OURS,
    SOURCES,
    Verdict,
    judged,
)
from tests.support.limits import LIMIT
from tests.support.published import sample_runs

COUNT, SEED = 1000, 20
# Every drawn precision has a figure. Every drawn model repeats blocks and has built-in ops alone, over one sequence. No
# drawn layout reduces gradients in bf16, for which the judge, who reduces none, has no answer.
UNDRAWN = {
    *("precision", "grad-reduce", "recompute-blocks", "sequence-pairs"),
    *(rule.id for rule in (*FSDP_RULES, *EXPERT_SHARD_RULES)),
}
UNBUILT = {"mamba-chunks"}  # the judge builds transformer blocks only


CITED = version("megatron-core").startswith("0.16.")  # the rules cite lines of 0.16.1
WANTS_LINES = pytest.mark.skipif(not CITED, reason="the rules cite lines of megatron-core 0.16.1")
# What 0.19.2 allows and refuses against 0.16.1, for layouts that our runtime does not run.
NOW_LEGAL = ("overlap-experts-mtp",)
NOW_REFUSED = "disable moe in recompute_modules when enabling overlap_moe_expert_parallel_comm"


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    return launcher.run(judged, (COUNT, SEED), 1, timeout=LIMIT)[0]


@WANTS_LINES
def test_the_rules_say_what_megatron_core_says(verdicts: list[Verdict]) -> None:
    assert len(verdicts) == COUNT
    assert [v for v in verdicts if not v.agrees] == []


@pytest.mark.skipif(CITED, reason="this is about later releases of megatron-core")
def test_later_releases_of_megatron_core_refuse_the_same_layouts(verdicts: list[Verdict]) -> None:
    differing = [v for v in verdicts if (v.refusal is None) != (not v.theirs)]
    explained = [v for v in differing if (v.refusal.message == NOW_REFUSED if v.refusal else v.theirs == NOW_LEGAL)]
    assert differing == explained


def test_both_answers_are_given_often(verdicts: list[Verdict]) -> None:
    assert COUNT / 4 < sum(v.refusal is None for v in verdicts) < COUNT * 3 / 4


@WANTS_LINES
def test_each_rule_of_megatron_core_is_one_that_it_gives_up_by(verdicts: list[Verdict]) -> None:
    raised = {v.refusal.where for v in verdicts if v.refusal}
    theirs = {rule.id for rule in RULES if rule.owner in (Owner.CORE, Owner.CALLERS)} | CORE_ALONE - UNBUILT
    assert {rule for rule in theirs if not SOURCES[rule] & raised} == set()
    assert raised <= set().union(*(SOURCES[rule] for rule in theirs))


@WANTS_LINES
def test_megatron_core_gives_up_on_interleaved_mamba_where_the_rule_says() -> None:
    ((file, _, line),) = (source.partition(":") for source in SOURCES["mamba-chunks"] if ".py:" in source)
    folder = Path(next(iter(find_spec("megatron.core").submodule_search_locations)))
    text = (folder / "ssm" / file).read_text().splitlines()[int(line) - 1]
    assert text.strip() == "assert self.config.virtual_pipeline_model_parallel_size is None, ("


@WANTS_LINES
def test_what_else_is_refused_megatron_core_takes(verdicts: list[Verdict]) -> None:
    assert (
        OURS
        == {"etp-experts", "stages", "group-vpp", "recompute-none", "recompute-modules", "overlap-tensor-node"}
        | UNDRAWN
    )
    assert {r for v in verdicts if v.refusal is None for r in v.stricter} == OURS - UNDRAWN


def test_every_published_layout_that_ran_is_legal() -> None:
    runs = [run for run in sample_runs().values() if run.source != "megatron-functional"]
    assert len(runs) > 30
    for run in runs:
        broken = [v.rule for v in violations(run.layout, graph(run.model), run.workload, run.cluster)]
        assert [rule for rule in broken if rule not in OURS] == [], run.id


def test_a_published_recipe_for_more_devices_than_it_has_is_refused() -> None:
    """Megatron-Bridge's docs/performance-summary-archive.md, container 25.09: DeepSeek-V3 on 256 GB200, PP8 EP64."""
    layout, work = Layout(dp=32, pp=8, vpp=2, ep=64), Workload(seq=4096, batch=2048)
    broken = violations(layout, graph(find("deepseek-v3-mtp")[0]), work, cluster("256xGB200"))
    assert [str(v) for v in broken] == [
        "pp 8 x 64 (the larger of tp x cp = 1 and ep x etp = 64) needs 512 devices or a multiple, but there are 256 "
        "[expert-grid]\nuse ep 32, or pp 4, or 512 devices"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "deepseek-v3 --gpus 128xH100 --pp 16 --ep 64",
            "pp 16 x 64 (the larger of tp x cp = 1 and ep x etp = 64) needs 1,024 devices or a multiple, but there "
            "are 128 [expert-grid]\nuse --pp 2 instead of --pp 16\nuse --ep 8 instead of --ep 64\n",
        ),
        (
            "mixtral-8x7b --gpus 24xH100 --tp 2 --cp 3 --pp 2 --ep 8 --seq 6144 --batch 24",
            "pp 2 x 24 (the least common multiple of tp x cp = 6 and ep x etp = 8) needs 48 devices or a multiple, "
            "but there are 24 [expert-grid]\nuse --pp 1 instead of --pp 2\nuse --ep 4 instead of --ep 8\n",
        ),
        (
            "llama3-70b --gpus 8xH100 --tp 8 --pp 4",
            "dp 1 x tp 8 x pp 4 x cp 1 takes 32 devices, but 8xH100 has 8 [world]\n"
            "use --tp 2 instead of --tp 8\nuse --pp 1 instead of --pp 4\n",
        ),
    ],
)
def test_too_few_devices_are_refused_with_how_many_it_takes(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    assert message in capsys.readouterr().err
