"""The engine in a loop of the user's own: batches of a data-parallel rank, evaluation, logits, checkpoints."""

from pathlib import Path
from socket import gethostname
from typing import Any
from unittest import mock

import pytest
import torch
from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe, shard
from megaloom.runtime.launch import launcher
from tests.support.batches import next_token
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named

TP2 = Layout(tp=2, sequence_parallel=True)
RECIPE = Recipe(steps=10, lr=1e-2, warmup=0)
LAYOUTS = {
    "DP2 micro-batch 2": ("tiny_llama", Layout(dp=2, micro_batch=2)),
    "DP2 PP2 VPP2": ("deep_llama", Layout(dp=2, pp=2, vpp=2)),
    "TP2 SP CP2": ("tiny_gpt", evolve(TP2, cp=2)),
    "TP2 SP PP2": ("tiny_gpt", evolve(TP2, pp=2)),
}
TOKENS = torch.randint(127, (12, 33), generator=torch.Generator().manual_seed(0))


def own(plan: Plan, dp_rank: int, step: int) -> Any:
    """Return a data-parallel rank's rows of global batch `step`: its micro-batches, every dp-th. Also as text."""
    layout, batch = plan.layout, TOKENS[4 * step : 4 * step + 4]
    text = batch.unflatten(0, (-1, layout.dp, layout.micro_batch))[:, dp_rank].flatten(0, 1)
    return text if step == 1 else next_token(text)


def looped(plan: Plan, folder: Path) -> dict[str, Any]:
    """On each rank: two steps of the user's loop, an evaluation of uneven batches, logits, and a step after a load."""
    from megatron.core import parallel_state

    engine = shard(model_named(plan.model), plan, RECIPE)
    dp_rank = engine.groups.dp_rank
    losses = [engine.step(own(plan, dp_rank, step)).loss for step in (0, 1)]
    logits = engine.logits(next_token(TOKENS[:3]))
    at_ends = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    assert at_ends == (engine.groups.pp_rank == 0, logits is not None)
    uneven = [next_token(TOKENS[:2]), TOKENS[2:3]] if dp_rank == 0 else [TOKENS[3:8]]
    if plan.layout.dp == 1:
        uneven = [TOKENS[:5], TOKENS[5:8]]
    evaluated = engine.evaluate(uneven)
    engine.save(folder)
    losses.append(engine.step(own(plan, dp_rank, 2)).loss)
    assert engine.load(folder) == 2
    again = engine.step(own(plan, dp_rank, 2)).loss
    return {"losses": losses, "again": again, "logits": logits, "evaluated": (evaluated.loss, evaluated.tokens)}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_loop_computes_what_one_process_computes(case: str, plan_of: Any, tmp_path: Path) -> None:
    name, layout = LAYOUTS[case]
    expected = launcher.run(looped, (plan_of(name, Layout()), tmp_path / "one"), 1, timeout=LIMIT)[0]
    results = launcher.run(looped, (plan_of(name, layout), tmp_path / "many"), layout.world, timeout=LIMIT)
    whole = [rank["logits"] for rank in results if rank["logits"] is not None]
    assert len(whole) == layout.world // layout.pp
    for logits in whole:
        assert logits.shape == (3, 32, 127)
        assert torch.allclose(logits, expected["logits"], atol=1e-4)
    for rank in results:
        assert rank["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert rank["again"] == pytest.approx(rank["losses"][2], abs=1e-6)
        assert rank["evaluated"][0] == pytest.approx(expected["evaluated"][0], abs=1e-5)
        assert rank["evaluated"][1] == 8 * 32


def messages(plan: Plan) -> list[str]:
    """On each rank: the messages of batches that are refused."""
    engine = shard(model_named(plan.model), plan, RECIPE)
    batches: list[Any] = [
        TOKENS[:4, :-1],
        TOKENS[:4],
        TOKENS[:2] + 100,
        TOKENS[:2].float(),
        {"tokens": TOKENS[:2, 1:]},
        {**next_token(TOKENS[:2]), "labels": TOKENS[:1, 1:]},
        {**next_token(TOKENS[:2]), "labels": TOKENS[:2]},
        [TOKENS],
        next_token(TOKENS[:2]) if engine.groups.dp_rank == 0 else {"tokens": TOKENS[:2, 1:]},
    ]
    out = []
    for batch in batches:
        with pytest.raises(UserError) as raised:
            engine.step(batch)
        out.append(str(raised.value))
    return out


def test_wrong_batches_are_refused(plan_of: Any) -> None:
    first, second = launcher.run(messages, (plan_of("tiny_llama", Layout(dp=2)),), 2, timeout=LIMIT)
    shape, rows, ids, floats, missing, lengths, labels, kind, of_other = first
    assert shape == "a batch of text has shape [sequences, 33], the tokens that a sample of 32 reads; got [4, 32]"
    assert rows.startswith("the batch has 4 sequences, but each data-parallel rank takes 2 a step (batch 4 / dp 2)\n")
    assert ids.startswith("token ids must be from 0 to 126; the batch has ids from 1")
    assert floats == "a batch of text holds token ids, integers; got torch.float32"
    assert missing.startswith("a sample lacks labels")
    assert lengths == "the tensors of a batch have different numbers of sequences: {'tokens': 2, 'labels': 1}"
    assert labels.startswith("labels of a sample has the shape [33]")
    assert kind == "a batch is a tensor of token ids, or tensors by the names of inputs; got list"
    assert second[-1].startswith("a sample lacks labels")
    assert of_other == f"on rank 1 ({gethostname()}): {second[-1]}"


def moved(plan: Plan) -> tuple[dict[str, torch.dtype], set[str]]:
    """Return the element types and kinds of devices of a batch of an engine in bf16, where ranks compute on meta."""
    engine = shard(model_named(plan.model), plan, RECIPE)
    batch = {"image": torch.zeros(2, 3, 8, 8), "labels": torch.zeros(2, dtype=torch.long)}
    with mock.patch("megaloom.runtime.megatron.device.current", return_value=torch.device("meta")):
        found = engine.pipeline._on_device(batch)
    return {name: x.dtype for name, x in found.items()}, {x.device.type for x in found.values()}


def test_a_batch_moves_to_the_device_of_its_rank(plan_of: Any) -> None:
    """Images in the precision of the plan."""
    types, devices = launcher.run(moved, (plan_of("tiny_vit", Layout(), precision="bf16"),), 1, timeout=LIMIT)[0]
    assert types == {"image": torch.bfloat16, "labels": torch.long}
    assert devices == {"meta"}


def wrong_world(plan: Plan) -> str:
    with pytest.raises(UserError) as raised:
        shard(model_named(plan.model), plan, RECIPE)
    return str(raised.value)


def test_a_plan_for_other_ranks_is_refused(plan_of: Any) -> None:
    message = launcher.run(wrong_world, (plan_of("tiny_llama", Layout(dp=2)),), 1, timeout=LIMIT)[0]
    assert message.startswith("the plan is for 2 ranks, but 1 are running\n")
