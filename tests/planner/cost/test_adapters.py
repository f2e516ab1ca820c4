"""Plans of models with low-rank adapters: less memory, no gradient reduction of frozen weights, and the plan file."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megaloom.dsl import graph, lora, params
from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.planner import Layout, Plan, Workload, cluster, load
from megaloom.planner.cli.main import main
from megaloom.planner.contract.planned_model import planned_model
from megaloom.planner.cost.profiles.frameworks import OWN
from megaloom.planner.export.export import export_plan
from megaloom.planner.export.target import LAUNCH_FILES, Target
from megaloom.planner.rules.plan_check import check_plan
from megaloom.planner.search.pricing import Pricer

WORKLOAD = Workload(seq=1024, batch=64)


def priced(model: Any, layout: Layout) -> Any:
    pricer = Pricer(graph(model), cluster(f"{layout.world}xH100"), WORKLOAD, OWN, 0.05)
    return pricer.price(layout)


@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2, micro_batch=16), Layout(tp=2, pp=2, micro_batch=16), Layout(dp=4, shard="optimizer", micro_batch=16)],
    ids=str,
)
def test_frozen_weights_have_weights_only(layout: Layout) -> None:
    base, _ = find("gpt3-1-3b")  # GPT-2 would wait for the host, which launches the kernels of the adapters, too
    m = lora(base, 8)
    whole, adapted = (priced(x, layout).prediction for x in (base, m))
    before, after = (sum(map(Counter, x.nbytes), Counter()) for x in (whole, adapted))  # of all pipeline ranks
    assert before["weights"] < after["weights"] < 1.05 * before["weights"]
    assert after["gradients"] < 0.01 * before["gradients"]
    assert after["optimizer"] < 0.01 * before["optimizer"]
    assert after["activations"] < before["activations"]
    assert adapted.breakdown.get("gradient communication", 0) < whole.breakdown.get("gradient communication", 1)
    assert adapted.breakdown["backward"] < whole.breakdown["backward"]


def test_a_frozen_table_that_two_nodes_share_counts_once() -> None:
    """GPT-2's embedding and logits share one table."""
    m = lora(find("gpt2")[0], 8)
    (stage,) = priced(m, Layout(vocab_multiple=1)).stages
    assert stage.params == params(m)


def test_the_plan_has_the_adapters(tmp_path: Path, capsys: Any) -> None:
    file = str(tmp_path / "plan.json")
    words = ["gpt2", "--gpus", "2xH100", "--seq", "256", "--batch", "8", "--lora-rank", "8", "-o", file]
    assert main([*words, "--lora-targets", "c_attn,c_fc", "--lora-alpha", "4"]) in (None, 0)
    assert "124,439,808" not in capsys.readouterr().out
    plan = load(file)
    assert plan.lora is not None
    assert (plan.lora.rank, plan.lora.alpha, plan.lora.targets) == (8, 4.0, ("c_attn", "c_fc"))
    m = planned_model(plan)
    assert params(m, trained=True) == 12 * 8 * (4 * 768 + 5 * 768)
    check_plan(plan, m)
    refused_export(plan)


def refused_export(plan: Plan) -> None:
    for target in set(Target) - LAUNCH_FILES:
        with pytest.raises(UserError, match=r"with LoRA of rank 8|adapters"):
            export_plan(plan, planned_model(plan), target, "plan.json")


def test_other_options_of_adapters_need_a_rank(capsys: Any) -> None:
    assert main(["gpt2", "--lora-targets", "c_attn"]) == 2
    assert "--lora-targets needs the rank of the adapters" in capsys.readouterr().err
