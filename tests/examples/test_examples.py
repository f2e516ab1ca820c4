"""The models that come with Megaloom compute, and learn; that they are the published ones is in test_parameters."""

from __future__ import annotations

from math import log, prod

import pytest
import torch
import torch.nn.functional as F

from megaloom.dsl import Model, graph, without_loss
from megaloom.dsl.catalog import find
from megaloom.dsl.graph import vocabulary
from megaloom.examples.gpt2 import gpt
from megaloom.examples.llama3 import llama
from megaloom.examples.mixtral import mixtral
from megaloom.runtime.modules.initial_weights import initial_weight
from megaloom.runtime.reference.interpret import interpret


def test_a_mixtral_token_uses_two_experts() -> None:
    """13 B of Mixtral 8x7B's 47 B serve each token (arXiv:2401.04088, section 1)."""
    weights = graph(find("mixtral-8x7b")[0]).weights.values()
    used = sum(prod(d.known for d in s.value.shape) * (2 if s.outer else 1) for s in weights)
    assert round(used / 1e9) == 13


SMALL = [
    gpt("gpt", layers=2, heads=2, embed=32, vocab=61, seq=16, dropout=0.1),
    llama("llama", layers=2, heads=4, kv_heads=2, embed=32, ff=48, vocab=61),
    llama("tied llama", layers=2, heads=4, kv_heads=4, embed=32, ff=48, vocab=61, tied=True),
    mixtral("mixtral", layers=2, heads=4, kv_heads=2, embed=32, ff=48, experts=4, vocab=61),
    mixtral("wide heads", layers=1, heads=4, kv_heads=1, embed=32, ff=48, top_k=3, vocab=61, head_dim=16),
    find("stdlib-gpt")[0],
]


@pytest.mark.parametrize("m", SMALL, ids=lambda m: m.name)
def test_a_new_model_knows_nothing_and_learns(m: Model) -> None:
    """Its first loss is that of a uniform guess; a step against the gradient of one batch makes it better at that."""
    g, vocab = graph(m), vocabulary(m)
    text = torch.randint(vocab, (16, 17), generator=torch.Generator().manual_seed(0))
    weights = {name: initial_weight(s, seed=1).read().requires_grad_() for name, s in g.weights.items()}

    def loss() -> torch.Tensor:
        batch = {"tokens": text[:, :-1], "labels": text[:, 1:]}
        ((total, count),) = interpret(m, weights, batch)
        (logits,) = interpret(without_loss(m), weights, batch)
        assert logits.shape == (16, 16, vocab)
        mean = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        torch.testing.assert_close((total / count).float(), mean)
        return mean

    first = loss()
    assert abs(first.item() - log(vocab)) < 0.05
    first.backward()
    with torch.no_grad():
        for w in weights.values():
            assert w.grad.isfinite().all()
            assert w.grad.any()
            w -= 0.1 * w.grad
    assert loss().item() < first.item() - 0.001
