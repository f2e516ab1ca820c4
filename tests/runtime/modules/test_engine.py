"""Experts whose products are computed by a grouped layer keep their parameters, and compute what they did."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.planned_model import planned_model
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from megaloom.runtime.training import verify
from tests.support.batches import next_token, random_text
from tests.support.limits import LIMIT


class GroupedLinear(nn.Module):
    """Stands for Transformer Engine's, which needs a GPU: weights by their names, tokens split by counts."""

    def __init__(self, number: int, columns: int, rows: int, *, device: str, params_dtype: Any, **_: Any) -> None:
        super().__init__()
        for i in range(number):
            weight = torch.empty(rows, columns, device=device, dtype=params_dtype)
            self.register_parameter(f"weight{i}", nn.Parameter(weight))

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        parts = zip(x.split(counts), self.parameters(), strict=True)
        return torch.cat([part @ weight.T for part, weight in parts])


def curve(plan: Plan, grouped: bool) -> tuple[verify.Curve, list[str]]:
    """On each rank: three steps, and the names of parameters."""
    from megaloom.runtime.engine.engine import Engine
    from megaloom.runtime.modules.experts import Experts

    stub, built, names = ModuleType("transformer_engine.pytorch"), Experts.__init__, list[str]()
    stub.GroupedLinear = GroupedLinear  # type: ignore[attr-defined]
    sys.modules["transformer_engine"] = ModuleType("transformer_engine")
    sys.modules["transformer_engine"].pytorch = stub  # type: ignore[attr-defined]
    sys.modules["transformer_engine.pytorch"] = stub

    def build(self: Experts, *args: Any, **rest: Any) -> None:
        built(self, *args, **rest)
        self.use_engine(adds_gradients=False)

    if grouped:
        Experts.__init__ = build  # type: ignore[method-assign]
    made = Engine.build
    Engine.build = lambda *args, **rest: _noted(made(*args, **rest), names)  # type: ignore[assignment, method-assign]
    return verify.short_run(plan, 3, 1234), names


def _noted(engine: Any, names: list[str]) -> Any:
    names += [name for chunk in engine.model_chunks for name, _ in chunk.named_parameters()]
    return engine


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("tiny_mixtral", Layout(dp=2, ep=2, shard="optimizer")),
        ("tiny_gpt_oss", Layout()),
    ],
    ids=str,
)
def test_a_grouped_layer_multiplies_by_the_weights_of_the_experts(name: str, layout: Layout, plan_of: Any) -> None:
    plan = plan_of(name, layout)
    (one, names), (grouped, same) = (
        launcher.run(curve, (plan, grouped), layout.world, timeout=LIMIT)[0] for grouped in (False, True)
    )
    comparison = verify.Comparison(grouped, one, 1e-6)
    assert comparison.agrees, f"losses differ by {comparison.loss_error:.1e}, norms by {comparison.norm_error:.1e}"
    assert names == same and any("local_experts" in x for x in names)


def casts(plan: Plan) -> list[list[bool]]:
    """On each rank: for one layer of each chunk, whether it would cast its weights, in each forward pass of two steps.

    Transformer Engine's layers, which need a GPU, cast if the attribute is true, and use that cast while it is false.
    """
    from megaloom.runtime.engine.engine import Engine

    def note(module: Any, _: Any) -> None:
        noted[module].append(module.is_first_microbatch)
        module.is_first_microbatch = False

    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    engine = Engine.build(plan, planned_model(plan), Recipe(steps=10))
    noted: dict[Any, list[bool]] = {}
    for chunk in engine.model_chunks:
        layer: Any = next(module for module in chunk.modules() if isinstance(module, ColumnParallelLinear))
        layer.is_first_microbatch, noted[layer] = False, []
        layer.register_forward_pre_hook(note)
    for step in range(2):
        engine.step(lambda i, step=step: next_token(random_text(8 * step + i, 127, 32)))
    return list(noted.values())


def test_weights_are_cast_once_a_step(plan_of: Any) -> None:
    """A cast that is kept for longer is of weights that the optimizer has changed since."""
    for found in launcher.run(casts, (plan_of("tiny_gpt", Layout(pp=2, vpp=2)),), 2, timeout=LIMIT):
        assert len(found) == 2
        for flags in found:
            count = len(flags) // 2
            assert count > 1 and flags == [True, *[False] * (count - 1)] * 2
