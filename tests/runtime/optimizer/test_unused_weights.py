"""Weights that the loss of some data-parallel ranks leaves out: with every sharding they get the gradients of DDP."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megaloom.dsl import (
    Dim,
    Embed,
    Model,
    NextToken,
    RMSNorm,
    SwiGLU,
    Unembed,
    graph,
    ids,
    labels,
    model,
    repeat,
    residual,
    weight,
    weighted_sum,
)
from megaloom.dsl.errors import UserError
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe, shard
from megaloom.runtime.optimizer.unused_weights import REDUCES_UNUSED, check_outputs
from tests.support.batches import next_token, random_text
from tests.support.models.examples import model_named
from tests.support.parity.layouts import under_layouts
from tests.support.paths import TEST_MODELS

MODELS = {
    "two heads of one unit": f"{TEST_MODELS / 'scored.py'}:scored",
    "heads with blocks of their own": f"{__file__}:two_depths",
}
SHARDS: list[dict[str, Any]] = [
    {},
    {"shard": "gradients"},
    {"shard": "weights"},
    {"shard": "weights", "reshard": "step"},
]


def two_depths() -> Model:
    """Two heads, of which the second one reads one more block than the first."""
    vocab, embed = Dim("vocab", 127), Dim("embed", 32)
    block = residual(RMSNorm(), SwiGLU(48))
    x = ids() >> Embed(weight("wte", vocab, embed)) >> repeat(2, block)
    y = labels()
    near = x >> RMSNorm() >> Unembed(weight("near", vocab, embed)) >> NextToken(y)
    far = x >> repeat(1, block) >> RMSNorm() >> Unembed(weight("far", vocab, embed)) >> NextToken(y, offset=1)
    return model("two-depths", weighted_sum((1.0, near), (0.5, far)))


class OneOutput:
    """Trains on the squares of one output."""

    def __init__(self, name: str) -> None:
        self.name = name

    def training_step(self, forward: Callable[..., Any], batch: dict[str, Tensor]) -> Any:
        outputs = forward(batch)
        if outputs is None:
            return None
        x = outputs.gathered(self.name).float()
        return x.square().mean(tuple(range(1, x.ndim))).sum(), torch.tensor(float(len(x)))


def curve(plan: Plan) -> list[tuple[float, float]]:
    """On each rank: loss and gradient norm of three steps. In the first two, ranks read different outputs."""
    trained, rank = model_named(plan.model), torch.distributed.get_rank()
    first, last = graph(trained).predictions
    step, has_mask = OneOutput(first), "mask" in graph(trained).index
    engine, out = shard(trained, plan, Recipe(steps=10, lr=1e-2, warmup=0), steps=step), []
    for number in range(3):
        step.name = first if number in (rank, 2) else last
        rows = next_token(torch.stack([random_text(8 * number + 2 * rank + i, 127, 32) for i in range(2)]))
        result = engine.step({**rows, "mask": torch.ones(2, 32, dtype=torch.bool)} if has_mask else rows)
        out.append((result.loss, result.grad_norm))
    return out


@pytest.fixture(scope="module")
def curves(plan_of: Any) -> dict[str, Any]:
    plans = {(name, i): plan_of(MODELS[name], Layout(dp=2, **x)) for name in MODELS for i, x in enumerate(SHARDS)}
    return under_layouts(curve, {f"{name} {i}": plan for (name, i), plan in plans.items()})


@pytest.mark.parametrize("name", MODELS)
def test_ranks_may_leave_out_weights(name: str, curves: dict[str, Any]) -> None:
    expected = curves[f"{name} 0"][0]
    assert len({norm for _, norm in expected}) == 3
    for i in range(1, len(SHARDS)):
        for rank in curves[f"{name} {i}"]:
            for found, step in zip(rank, expected, strict=True):
                assert found == pytest.approx(step, rel=1e-5), SHARDS[i]


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where outputs are computed from different weights: a step may leave out some."""
    nodes, outputs = graph(two_depths()).nodes, graph(two_depths()).predictions
    chunk: Any = SimpleNamespace(node_modules=lambda: ((n, None) for n in nodes), writes=outputs)
    check_outputs(chunk)
    monkeypatch.delattr(FSDPModule, REDUCES_UNUSED)
    with pytest.raises(UserError, match=r"sharded weights need torch 2\.13"):
        check_outputs(chunk)
    chunk.writes = outputs[:1]
    check_outputs(chunk)
