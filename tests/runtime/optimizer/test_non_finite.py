"""A NaN or an infinity is found before any weight changes, named by rank, layer and parameter, or skipped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve

from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from tests.support.batches import next_token, random_text
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named

RECIPE = Recipe(steps=10, lr=1e-2, warmup=0)
TP2 = Layout(tp=2, sequence_parallel=True)


def sample(i: int) -> dict[str, torch.Tensor]:
    return next_token(random_text(i, 127, 32))


def state(engine: Any) -> list[torch.Tensor]:
    """Return copies of all weights, buffers, master weights and moments of this rank."""
    from megaloom.runtime.megatron.optimizer_state import parameter_states
    from megaloom.runtime.megatron.weight_shards import own_values

    tensors = [own_values(t) for chunk in engine.model_chunks for t in (*chunk.parameters(), *chunk.buffers())]
    tensors += [t for one in parameter_states(engine.state.optimizer) for t in one.tensors]
    return [t.detach().clone() for t in tensors]


def equal(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))


def poison(engine: Any, kind: str, node: str, parameter: str) -> Callable[[], None]:
    """Make a weight, its gradient, or the output of its node not finite on this rank. Return a function to end it."""
    from megaloom.runtime.megatron.weight_shards import own_values

    for chunk in engine.model_chunks:
        for n, module in chunk.node_modules():
            if n.name == node:
                p = module.get_parameter(parameter)
                if kind == "weight":
                    with torch.no_grad():
                        own_values(p).view(-1)[0] = torch.nan
                    return lambda: None
                if kind == "gradient":
                    return p.register_hook(lambda gradient: gradient * torch.inf).remove
                return module.register_forward_hook(lambda module, inputs, out: out * torch.inf).remove
    return lambda: None


def failed(plan: Plan, kind: str, node: str, parameter: str, rank: int) -> tuple[str, bool]:
    """On each rank: the message of a step that is poisoned on one rank, and whether the state is unchanged."""
    from megaloom.runtime.engine.engine import Engine
    from megaloom.runtime.optimizer.weight_update import NonFiniteError

    engine = Engine.build(plan, model_named(plan.model), RECIPE)
    engine.step(sample)
    if dist.get_rank() == rank:
        poison(engine, kind, node, parameter)
    before = state(engine)
    with pytest.raises(NonFiniteError) as raised:
        engine.step(sample)
    return str(raised.value), equal(before, state(engine))


CASES = {
    "a weight, TP2 SP": ("tiny_llama", TP2, "weight", "swiglu", "linear_fc1.weight", 1),
    "a gradient, TP2 SP": ("tiny_llama", TP2, "gradient", "swiglu", "linear_fc1.weight", 1),
    "an output, TP2 SP": ("tiny_llama", TP2, "output", "swiglu", "linear_fc1.weight", 1),
    "an output, PP2": ("tiny_llama", Layout(pp=2), "output", "swiglu", "linear_fc1.weight", 1),
    "a gradient, DP2 distributed optimizer": (
        "tiny_llama",
        Layout(dp=2, shard="optimizer", overlaps=()),
        "gradient",
        "swiglu",
        "linear_fc1.weight",
        1,
    ),
    "a weight, DP2 sharded weights": (
        "tiny_llama",
        Layout(dp=2, shard="weights"),
        "weight",
        "swiglu",
        "linear_fc1.weight",
        0,
    ),
    "an output, DP2 sharded gradients": (
        "tiny_llama",
        Layout(dp=2, shard="gradients"),
        "output",
        "swiglu",
        "linear_fc1.weight",
        1,
    ),
    "an expert's gradient, EP2": (
        "tiny_deepseek_v3",
        Layout(dp=2, ep=2),
        "gradient",
        "moe",
        "experts.local_experts.0.linear_fc1.weight",
        1,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_finite_is_named_and_nothing_moves(case: str, plan_of: Any) -> None:
    name, layout, kind, layer, parameter, rank = CASES[case]
    plan = plan_of(name, layout)
    from megaloom.dsl import graph

    nodes = [n for n in graph(model_named(plan.model)).nodes if layer in n.name.split(".")[0]]
    node = nodes[-1].name
    results = launcher.run(failed, (plan, kind, node, parameter, rank), layout.world, timeout=LIMIT)
    named = {
        "weight": f"the parameter {parameter} is not finite",
        "gradient": f"the gradient of {parameter} is not finite",
        "output": "its output is not finite",
    }[kind]
    shared = kind == "gradient" and layout.dp > 1 and layout.ep == 1  # reduced over both ranks before it is seen
    for message, unchanged in results:
        assert message.startswith("step 2: loss ")
        assert message.endswith(f"first at {node}: {named} on rank {0 if shared else rank}"), message
        assert unchanged


def skipping(plan: Plan, folder: Path, start: int) -> tuple[list[float], list[bool], int]:
    """On each rank: losses and skips of steps from `start` to 3; step 1 is poisoned, and saved after step 2."""
    from megaloom.runtime.checkpoints import checkpoint
    from megaloom.runtime.checkpoints.checkpoint_folder import latest
    from megaloom.runtime.checkpoints.manifest import Manifest
    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, model_named(plan.model), evolve(RECIPE, skip_non_finite=1))
    if start:
        found = latest(folder, fingerprint=plan.fingerprint)
        assert found
        checkpoint.load(engine.state, found)
    losses, skips = [], []
    for step in range(start, 4):
        node = next(n.name for chunk in engine.model_chunks for n, _ in chunk.node_modules() if "mlp" in n.name)
        end = poison(engine, "gradient", node, "linear_fc1.weight") if step == 1 else lambda: None
        before = state(engine)
        result = engine.step(lambda i, step=step: sample(4 * step + i))  # type: ignore[misc]
        end()
        assert engine.plan.layout.distributed_optimizer or equal(before, state(engine)) == result.skipped
        losses.append(result.loss)
        skips.append(result.skipped)
        if engine.done == 3 and not start:
            manifest = Manifest(
                step=3, samples=12, model="m", fingerprint=plan.fingerprint, data="", recipe={}, layout=str(plan.layout)
            )
            checkpoint.save(engine.state, folder, manifest)
    return losses, skips, engine.state.skipped


@pytest.mark.parametrize("layout", [TP2, Layout(dp=2, shard="optimizer")], ids=str)
def test_steps_are_skipped_by_choice_and_counted(layout: Layout, plan_of: Any, tmp_path: Path) -> None:
    """Adam's count of steps has no skipped ones, also after a load under another layout."""
    losses, skips, count = launcher.run(skipping, (plan_of("tiny_gpt", layout), tmp_path, 0), 2, timeout=LIMIT)[0]
    assert skips == [False, True, False, False]
    assert count == 1
    resumed, _, count = launcher.run(skipping, (plan_of("tiny_gpt", Layout()), tmp_path, 3), 1, timeout=LIMIT)[0]
    assert resumed == pytest.approx(losses[3:], abs=1e-5)
    assert count == 1


def twice(plan: Plan) -> str:
    """On each rank: the message of the second poisoned step, where one may be skipped."""
    from megaloom.runtime.engine.engine import Engine
    from megaloom.runtime.optimizer.weight_update import NonFiniteError

    engine = Engine.build(plan, model_named(plan.model), evolve(RECIPE, skip_non_finite=1))
    poison(engine, "weight", "swiglu.0", "linear_fc1.weight")
    assert engine.step(sample).skipped
    with pytest.raises(NonFiniteError) as raised:
        engine.step(sample)
    return str(raised.value)


def test_no_more_steps_are_skipped_than_allowed(plan_of: Any) -> None:
    message = launcher.run(twice, (plan_of("tiny_llama", Layout()),), 1, timeout=LIMIT)[0]
    assert message.startswith("step 2: loss nan, gradient norm nan: training has diverged\nfirst at swiglu.0: ")
