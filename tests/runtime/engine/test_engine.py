"""One step: what an evaluation leaves behind, who draws the same dropout, what padding learns."""

from typing import Any

import pytest
import torch

from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from tests.support.batches import next_token, random_text
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named

RECIPE = Recipe(steps=10, lr=1e-2, warmup=0)
FSDP = Layout(dp=2, shard="weights")
TP2 = Layout(tp=2, sequence_parallel=True)


def sample(i: int) -> dict[str, torch.Tensor]:
    return next_token(random_text(i, 127, 32))


def curve(plan: Plan, evaluating: bool) -> list[float]:
    """On each rank: the losses of three steps, maybe with an evaluation before each."""
    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, model_named(plan.model), RECIPE)
    losses = []
    for step in range(3):
        if evaluating:
            first, second = (engine.evaluate_samples(sample, 6) for _ in range(2))
            assert first == second
        losses.append(engine.step(lambda i, step=step: sample(4 * step + i)).loss)
        assert not any(sums.loss_sum.requires_grad for sums in engine.pipeline.returned), "a graph is held"
    return losses


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, shard="optimizer"), Layout(pp=2, vpp=2), FSDP], ids=str)
def test_an_evaluation_leaves_no_trace(layout: Layout, plan_of: Any) -> None:
    """Not in weights, gradients, nor what dropout draws: the losses are the same to the last bit."""
    plan = plan_of("tiny_gpt_dropout", layout)
    without, among = (
        launcher.run(curve, (plan, evaluating), layout.world, timeout=LIMIT)[0] for evaluating in (False, True)
    )
    assert among == without
    assert len(set(without)) == 3


def masks(plan: Plan) -> tuple[tuple[int, ...], list[bytes]]:
    """On each rank: its place (dp, cp, pp, tp), and what was kept by each dropout of hidden states in two steps."""
    from megaloom.runtime.engine.engine import Engine
    from megaloom.runtime.modules.layers import HiddenDropout

    engine = Engine.build(plan, model_named(plan.model), RECIPE)
    dropout_masks: list[bytes] = []
    for stage in engine.model_chunks:
        for module in stage.modules():
            if isinstance(module, HiddenDropout):
                module.register_forward_hook(
                    lambda module, args, out: dropout_masks.append((out != 0).numpy().tobytes())
                )
    for _ in range(2):
        engine.step(sample)
    groups = engine.groups
    return (groups.dp_rank, groups.cp_rank, groups.pp_rank, groups.tp_rank), dropout_masks


@pytest.mark.parametrize("layout", [Layout(dp=2, tp=2), Layout(cp=2), Layout(pp=2), Layout(pp=2, vpp=2), TP2], ids=str)
def test_each_share_of_the_hidden_states_has_its_own_dropout(layout: Layout, plan_of: Any) -> None:
    """No two masks are alike, of ranks, layers, micro-batches or steps; only copies of a state are masked alike."""
    results = launcher.run(masks, (plan_of("tiny_gpt_dropout", layout),), layout.world, timeout=LIMIT)
    seen: set[bytes] = set()
    for (*_, tp), dropout_masks in results:
        if tp == 0 or layout.sequence_parallel:
            assert not seen & set(dropout_masks)
            assert len(set(dropout_masks)) == len(dropout_masks) > 0
            seen |= set(dropout_masks)
    if layout.tp > 1 and not layout.sequence_parallel:
        by_place = dict(results)
        assert all(by_place[*position[:-1], 0] == dropout_masks for position, dropout_masks in results)


def padding(plan: Plan) -> list[float]:
    """On each rank: the greatest element of each table's last row, after three steps."""
    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, model_named(plan.model), RECIPE)
    for _ in range(3):
        engine.step(sample)
    tables = [p for name, p in engine.model_chunks[0].named_parameters() if "embed_0" in name]
    return [p[-1].abs().max().item() for p in tables]


@pytest.mark.parametrize(("name", "tables"), [("tiny_gpt", 1), ("tiny_llama", 2)])
def test_rows_that_pad_the_vocabulary_stay_zero(name: str, tables: int, plan_of: Any) -> None:
    """Of 127 tokens, the second of two ranks has 63 and a row of padding."""
    real, padded = launcher.run(padding, (plan_of(name, Layout(tp=2, vocab_multiple=1)),), 2, timeout=LIMIT)
    assert padded == [0.0] * tables
    assert min(real) > 0
