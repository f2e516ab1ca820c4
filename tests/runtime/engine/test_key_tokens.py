"""The key-token loss, as steps and as a layer, is that of plain torch under every layout."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megaloom.examples.scripts.key_tokens import KEY_TOKENS, KeyTokenSteps
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe, shard
from tests.support.models.examples import model_named
from tests.support.parity.layouts import Results, under_layouts
from tests.support.paths import ROOT

SCRIPT = ROOT / "examples/scripts/key_tokens.py"
FORMS = ("decoder", "with_key_tokens")
BATCH, SEQ, ALPHA = 4, 32, 0.25
SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS = {
    "DP1": Layout(micro_batch=2),
    "TP2 SP PP2 VPP2": Layout(**SP, pp=2, vpp=2),
    "CP2 DP2": Layout(cp=2, dp=2, micro_batch=2),
    "CP2 TP2 SP": Layout(cp=2, **SP, micro_batch=2),
}


def rows() -> dict[str, Tensor]:
    """Return a global batch with many key tokens, whose sequences count other numbers of positions."""
    text = torch.randint(36, 64, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(1))
    counted = torch.arange(SEQ) < torch.tensor([[32], [20], [7], [1]])
    return {"tokens": text[:, :-1], "labels": text[:, 1:], "mask": counted}


def by_torch(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of Accelerate's guide, from whole logits [batch, seq, vocab]."""
    loss_mask = batch["mask"].float()
    losses = F.cross_entropy(logits.float().transpose(1, 2), batch["labels"], reduction="none")
    loss_per_sample = (losses * loss_mask).sum(axis=1) / loss_mask.sum(axis=1)
    weights = torch.stack([(batch["tokens"] == kt).float() for kt in KEY_TOKENS]).sum(axis=[0, 2])
    return (loss_per_sample * (1.0 + ALPHA * weights)).mean()


def losses(plan: Plan) -> list[float]:
    """On each rank: loss and gradient norm of two steps; in one process, the loss of plain torch before the first."""
    declared, layout = model_named(plan.model), plan.layout
    steps = KeyTokenSteps(alpha=ALPHA) if declared.name == "decoder" else None
    engine = shard(declared, plan, Recipe(steps=10, lr=1e-2, warmup=0), steps=steps)
    share = BATCH // layout.dp
    own = {k: x[engine.groups.dp_rank * share :][:share] for k, x in rows().items()}
    before = []
    if layout.world == 1:
        logits = engine.logits(own)
        assert logits is not None
        before = [by_torch(logits, own).item()]
    results = [engine.step(own) for _ in range(2)]
    assert all(list(r.report) == ["lm loss"] * (steps is not None) for r in results)
    return [*before, *(x for r in results for x in (r.loss, r.grad_norm))]


@pytest.fixture(scope="module")
def found(plan_of: Any) -> Results:
    plans = {
        f"{name} {form}": plan_of(f"{SCRIPT}:{form}", layout, batch=BATCH, seq=SEQ)
        for name, layout in LAYOUTS.items()
        for form in FORMS
    }
    return under_layouts(losses, plans)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_and_layer_have_the_loss_of_plain_torch(layout: str, found: Results) -> None:
    expected, *trained = found["DP1 decoder"][0]
    assert trained[0] == pytest.approx(expected, rel=1e-6)
    for form in FORMS:
        for rank in found[f"{layout} {form}"]:
            assert rank[-4:] == pytest.approx(trained, rel=1e-5)
