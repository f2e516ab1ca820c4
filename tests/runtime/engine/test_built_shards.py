"""Memory while an engine with sharded weights is built: a rank never holds more than its shards and one unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from megaloom.dsl.catalog import find
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from tests.runtime.megatron.test_held_memory import Held
from tests.support.limits import LIMIT

WEIGHTS = Layout(dp=4, shard="weights")


class Allocated(Held):
    """The bytes of tensors that have memory, those inside of DTensors included."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            x = t.to_local() if isinstance(t, DTensor) else t
            if isinstance(x, torch.Tensor) and not x.is_meta and x.numel():
                self._made(x.untyped_storage())
        return out


@frozen
class Peak:
    """Most bytes of tensors while an engine is built, and the fp32 bytes of shards, largest unit and model."""

    built: int
    shards: int
    unit: int
    whole: int


def peak(plan: Plan) -> Peak:
    from megaloom.runtime.engine.engine import Engine

    model, recipe = find(plan.model)[0], Recipe(steps=10, warmup=0)
    Engine.build(plan, model, recipe)  # makes what is made once in a process
    with Allocated(set()) as build:
        engine = Engine.build(plan, model, recipe)
    (chunk,), (wrapped,) = engine.model_chunks, engine.state.chunks
    rows = sum(p.numel() for p in wrapped.parameters())
    units = [sum(p.numel() for p in unit.parameters()) for unit in chunk.segment_runners]
    return Peak(build.most, 4 * rows, 4 * max(units), 4 * sum(units))


def test_no_rank_holds_more_than_its_shards_and_one_unit(plan_of: Callable[..., Plan]) -> None:
    for rank in launcher.run(peak, (plan_of("deep_llama", WEIGHTS),), 4, timeout=LIMIT):
        assert rank.shards == rank.whole / 4
        assert rank.shards <= rank.built <= rank.shards + rank.unit < rank.whole / 2
