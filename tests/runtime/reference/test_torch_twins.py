"""The oracle computes what plain torch computes for layers, losses and experts of one's own."""

import pytest
import torch
from attrs import evolve

from megaloom.dsl import graph
from megaloom.runtime import Recipe
from megaloom.runtime.training.verify import EPS
from tests.support.models import twins
from tests.support.parity.oracle import Oracle
from tests.support.parity.torch_twins import TWINS

STEPS, ROWS = 2, 3


def batch(step: int) -> dict[str, torch.Tensor]:
    text = torch.randint(97, (ROWS, twins.SEQ + 1), generator=torch.Generator().manual_seed(step))
    mask = torch.rand(ROWS, twins.SEQ, generator=torch.Generator().manual_seed(10 + step)) < torch.tensor(
        [[0.9], [0.5], [0.1]]
    )
    return {"tokens": text[:, :-1], "labels": text[:, 1:], "mask": mask}


@pytest.mark.parametrize("name", TWINS)
def test_the_oracle_computes_what_plain_torch_computes(name: str) -> None:
    model, recipe = getattr(twins, name)(), Recipe(steps=10, seed=3, warmup=0, eps=EPS)
    declared, plain = Oracle.of(model, recipe), evolve(Oracle.of(model, recipe), twin=TWINS[name])
    inputs = {n.name for n in graph(model).nodes if n.is_input}
    for step in range(STEPS):
        given = {k: x for k, x in batch(step).items() if k in inputs}
        (ours, found), (theirs, expected) = declared.step_with_gradients(given), plain.step_with_gradients(given)
        assert ours.loss == pytest.approx(theirs.loss, abs=2e-6)
        for weight, gradient in expected.items():
            torch.testing.assert_close(
                found[weight], gradient, rtol=1e-4, atol=1e-6, msg=lambda m, w=weight: f"{w}: {m}"
            )
    for weight, value in plain.weights.items():
        torch.testing.assert_close(declared.weights[weight], value, rtol=1e-4, atol=1e-5)
