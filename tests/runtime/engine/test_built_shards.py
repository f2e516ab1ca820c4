"""Memory while an engine with sharded weights is built: a rank never holds more than its shards and one unit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from megaloom.dsl import graph
from megaloom.dsl.hf.stored_names import SINGLE
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from megaloom.runtime.modules.initial_weights import initial_weight
from megaloom.runtime.weights.tensor_folder import open_tensors
from tests.runtime.megatron.test_held_memory import Held
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named

WEIGHTS = Layout(dp=4, shard="weights")


class Allocated(Held):
    """The bytes of tensors that have memory, those inside of DTensors included. Mapped files take none."""

    def __init__(self, mapped: tuple[range, ...] = ()) -> None:
        super().__init__(set())
        self.mapped = mapped

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            x = t.to_local() if isinstance(t, DTensor) else t
            if isinstance(x, torch.Tensor) and not x.is_meta and x.numel():
                storage = x.untyped_storage()
                if not any(storage.data_ptr() in addresses for addresses in self.mapped):
                    self._made(storage)
        return out


@frozen
class Peak:
    """Most bytes of tensors while an engine is built, and the fp32 bytes of shards, largest unit and model."""

    drawn: int  # with initial weights
    read: int  # with weights of files
    shards: int
    unit: int
    whole: int


def mapped(file: Path) -> tuple[range, ...]:
    """Return the addresses at which this process has mapped a file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    return tuple(range(*(int(end, 16) for end in line[0].split("-"))) for line in lines)


def peak(plan: Plan, folder: Path) -> Peak:
    from megaloom.runtime.engine.engine import Engine

    model, recipe = model_named(plan.model), Recipe(steps=10, warmup=0)
    weights = open_tensors(folder).tensors
    Engine.build(plan, model, recipe, weights=weights)  # makes what is made once in a process
    files = mapped(folder / SINGLE)
    assert files
    peaks = []
    for given in (None, weights):
        with Allocated(files) as build:
            engine = Engine.build(plan, model, recipe, weights=given)
        peaks.append(build.most)
    (chunk,), (wrapped,) = engine.model_chunks, engine.state.chunks
    rows = sum(p.numel() for p in wrapped.parameters())
    units = [sum(p.numel() for p in unit.parameters()) for unit in chunk.segment_runners]
    return Peak(*peaks, 4 * rows, 4 * max(units), 4 * sum(units))


def test_no_rank_holds_more_than_its_shards_and_one_unit(plan_of: Callable[..., Plan], tmp_path: Path) -> None:
    plan = plan_of("deep_llama", WEIGHTS)
    slots = graph(model_named(plan.model)).weights
    save_file({name: initial_weight(slot, 1).read() for name, slot in slots.items()}, tmp_path / SINGLE)
    for rank in launcher.run(peak, (plan, tmp_path), 4, timeout=LIMIT):
        assert rank.shards == rank.whole / 4
        for most in (rank.drawn, rank.read):
            assert rank.shards <= most <= rank.shards + rank.unit < rank.whole / 2
