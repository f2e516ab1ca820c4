"""Parameter groups by name: learning rate, weight decay, frozen; equal under every layout."""

from typing import Any

import pytest
import torch
from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import ParameterGroup, Recipe, shard
from megaloom.runtime.launch import launcher
from tests.support.batches import next_token
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named
from tests.support.paths import TEST_MODELS

TP2 = Layout(tp=2, sequence_parallel=True, vocab_multiple=1)  # each rank has rows of tokens, which change
RECIPE = Recipe(steps=10, lr=1e-2, min_lr=1e-3, warmup=2, weight_decay=0.1)
GROUPS = (
    ParameterGroup("embed.*", frozen=True),
    ParameterGroup("*.0.gate", lr=5e-3),
    ParameterGroup("swiglu.?.up", lr=5e-3),
    ParameterGroup("swiglu.*.gate", lr=5e-3),
    ParameterGroup("attention.*", lr=2e-2, weight_decay=0.5),
)
TOKENS = torch.randint(127, (12, 33), generator=torch.Generator().manual_seed(0))


def trained(plan: Plan, groups: tuple[ParameterGroup, ...]) -> dict[str, Any]:
    """On each rank: losses and norms of three steps, the settings of each parameter, and whether it has changed."""
    from megaloom.runtime.megatron.weight_shards import own_values
    from megaloom.runtime.optimizer.parameter_groups import named_parameters

    engine = shard(model_named(plan.model), plan, RECIPE, parameter_groups=groups)
    before = {names: own_values(p).detach().clone() for names, p in named_parameters(engine.model_chunks)}
    results = [engine.step(lambda i, k=k: next_token(TOKENS[4 * k + i])) for k in range(3)]  # type: ignore[misc]
    parameters = list(named_parameters(engine.model_chunks))
    changed = {name: not torch.equal(own_values(p), before[names]) for names, p in parameters for name in names}
    rate = engine.state.scheduler.get_lr({})
    settings = {
        (round(group["lr"] / rate, 6), round(group["weight_decay"], 6))
        for one in engine.state.optimizer.chained_optimizers
        for group in one.param_groups
        if group["params"]
    }
    curve = [(r.loss, r.grad_norm) for r in results]
    return {"curve": curve, "changed": changed, "settings": settings, "lr": results[-1].lr}


@pytest.mark.parametrize(
    "layout", [evolve(TP2, pp=2), Layout(dp=2, shard="optimizer"), Layout(dp=2, shard="weights")], ids=str
)
def test_groups_do_not_depend_on_the_layout(layout: Layout, plan_of: Any) -> None:
    one, *_ = launcher.run(trained, (plan_of("tiny_llama", Layout()), GROUPS), 1, timeout=LIMIT)
    plain, *_ = launcher.run(trained, (plan_of("tiny_llama", Layout()), ()), 1, timeout=LIMIT)
    for rank in launcher.run(trained, (plan_of("tiny_llama", layout), GROUPS), layout.world, timeout=LIMIT):
        assert rank["curve"] == [pytest.approx(step, abs=1e-5) for step in one["curve"]]
        assert {name for name, changed in rank["changed"].items() if not changed} <= {"wte"}
        assert rank["settings"] <= one["settings"]
        assert rank["lr"] == one["lr"] == plain["lr"]
    assert not one["changed"]["wte"]
    assert one["curve"][0][0] == plain["curve"][0][0]
    assert one["curve"][0][1] < plain["curve"][0][1]  # frozen gradients do not count
    assert one["curve"][2] != plain["curve"][2]
    assert one["settings"] == {(1.0, 0.1), (1.0, 0.0), (0.5, 0.1), (2.0, 0.5)}  # the optimizer has no frozen ones


@pytest.mark.parametrize(
    ("name", "layout"),
    [("tiny_gpt", Layout()), (f"{TEST_MODELS / 'shared_weights.py'}:albert", Layout(pp=2, vpp=2))],
    ids=str,
)
def test_a_tied_table_has_one_group(name: str, layout: Layout, plan_of: Any) -> None:
    """The table of the embedding is also that of the logits, on another stage a copy of it."""
    groups = (ParameterGroup("embed.*", frozen=True),)
    for rank in launcher.run(trained, (plan_of(name, layout), groups), layout.world, timeout=LIMIT):
        assert [name for name, changed in rank["changed"].items() if not changed] in (["wte"], ["table"])
        assert any(rank["changed"].values())


def refused(plan: Plan, groups: tuple[ParameterGroup, ...]) -> str:
    with pytest.raises(UserError) as raised:
        shard(model_named(plan.model), plan, RECIPE, parameter_groups=groups)
    return str(raised.value)


def test_a_group_without_parameters_is_refused(plan_of: Any) -> None:
    groups = (ParameterGroup("embed.*"), ParameterGroup("mlp.*", lr=1.0))
    (message,) = set(launcher.run(refused, (plan_of("tiny_llama", Layout(pp=2)), groups), 2, timeout=LIMIT))
    assert message.startswith("the parameter group 'mlp.*' matches no weight, or only those of earlier groups")
    assert "names are such as attention.0.k, " in message


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(cp=2)], ids=str)  # a module runs attention, or its body
def test_a_group_has_all_weights_of_a_parameter_under_every_layout(layout: Layout, plan_of: Any) -> None:
    """A module holds queries, keys and values in one parameter; a body does not."""
    plan = plan_of("tiny_vit", layout)
    group = ParameterGroup("attention.*.[qkv]*", lr=1e-3)
    for names in launcher.run(grouped, (plan, (group,)), 2, timeout=LIMIT):
        assert names == {f"attention.{i}.{x}{b}" for i in range(2) for x in "qkv" for b in ("", "_bias")}
    (message,) = set(launcher.run(refused, (plan, (ParameterGroup("*.q", frozen=True),)), 2, timeout=LIMIT))
    assert message == (
        "a parameter group has attention.0.q but not attention.0.k, which a module of megatron-core holds in one "
        "parameter\ngive the same settings to attention.0.q, attention.0.k, attention.0.v"
    )


def grouped(plan: Plan, groups: tuple[ParameterGroup, ...]) -> set[str]:
    """On each rank: the weights in the first group."""
    from megaloom.runtime.optimizer.parameter_groups import named_parameters

    engine = shard(model_named(plan.model), plan, RECIPE, parameter_groups=groups)
    return {name for names, p in named_parameters(engine.model_chunks) if p.parameter_group == 0 for name in names}
