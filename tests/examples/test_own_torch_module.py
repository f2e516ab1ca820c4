"""The torch module of examples/scripts: its declaration computes its function, and training starts from its weights."""

from typing import Any

import pytest
import torch

from megaloom.dsl.errors import UserError
from megaloom.examples.scripts.own_torch_module import SEQ, VOCAB, Decoder, difference, train, weights_of
from megaloom.planner.contract.layout import Layout
from megaloom.runtime.launch import launcher
from tests.support.limits import LIMIT
from tests.support.paths import ROOT

MODEL = f"{ROOT / 'examples/scripts/own_torch_module.py'}:declared"


def test_the_declaration_computes_what_the_module_computes() -> None:
    torch.manual_seed(0)
    assert difference(Decoder()) < 1e-5


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2, sequence_parallel=True)], ids=str)
def test_training_starts_from_the_modules_weights(layout: Layout, plan_of: Any) -> None:
    torch.manual_seed(0)
    module = Decoder()
    plan = plan_of(MODEL, layout, seq=SEQ)
    losses = launcher.run(train, (plan, weights_of(module)), layout.world, timeout=LIMIT)[0]
    tokens = (torch.arange(4)[:, None] + torch.arange(SEQ + 1)) % VOCAB
    logits = module.eval()(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert losses[0] == pytest.approx(float(loss), abs=1e-5)
    assert losses[-1] < losses[0]


def refused(plan: Any, weights: dict[str, torch.Tensor]) -> str:
    with pytest.raises(UserError) as raised:
        train(plan, weights, 1)
    return str(raised.value)


def test_wrong_weights_are_refused(plan_of: Any) -> None:
    weights, plan = weights_of(Decoder()), plan_of(MODEL, Layout(), seq=SEQ)
    wrong = {name: w for name, w in weights.items() if name != "head"}
    (message,) = launcher.run(refused, (plan, wrong), 1, timeout=LIMIT)
    assert message.startswith("no weight 'head' [vocab=256 embed=64]; the names given are tokens, positions")
    (message,) = launcher.run(refused, (plan, weights | {"head": weights["head"].T}), 1, timeout=LIMIT)
    assert message == "weight 'head' has shape [vocab=256 embed=64], but the tensor given has sizes [64, 256]"
    (message,) = launcher.run(refused, (plan, weights | {"mlp.9.up": weights["head"]}), 1, timeout=LIMIT)
    assert message == "model 'own-torch-module' has no weight 'mlp.9.up'"
