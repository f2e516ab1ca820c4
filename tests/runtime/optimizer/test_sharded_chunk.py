"""Weights sharded over data-parallel ranks: collectives of a step, memory at rest, and what parameters keep."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import frozen

from megaloom.dsl import (
    MLP,
    Dim,
    Embed,
    Layer,
    Model,
    NextToken,
    RMSNorm,
    Unembed,
    Value,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.planner.contract.choices import Reshard, Shard
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from tests.support.batches import next_token, random_text
from tests.support.models.examples import model_named
from tests.support.parity.layouts import under_layouts

RECIPE = Recipe(steps=10, lr=1e-2, warmup=0)
GRADIENTS = {"shard": Shard.GRADIENTS}
WEIGHTS = {"shard": Shard.WEIGHTS}
STEP = {"shard": Shard.WEIGHTS, "reshard": Reshard.STEP}
MICROBATCHES = 2
MIXED = {"dp": 2, "tp": 2, "ep": 2, "sequence_parallel": True}
CASES = {  # model, layout, and the gathers and reductions of a step
    # six units: embedding, four blocks, head. The head is kept for its backward pass; that of a lookup needs no rows.
    "gradients": ("tiny_llama_4", Layout(dp=2, **GRADIENTS), 6, 6 * MICROBATCHES),
    "weights": ("tiny_llama_4", Layout(dp=2, **WEIGHTS), (4 * 2 + 2) * MICROBATCHES, 6 * MICROBATCHES),
    "step": ("tiny_llama_4", Layout(dp=2, **STEP), 6, 6),
    "recompute": (
        "tiny_llama_4",
        Layout(dp=2, recompute="full", **WEIGHTS),
        (4 * 2 + 2) * MICROBATCHES,
        6 * MICROBATCHES,
    ),
    # three units: two blocks, and the tied table
    "tied": ("tiny_gpt", Layout(dp=2, **WEIGHTS), (2 * 2 + 1) * MICROBATCHES, 3 * MICROBATCHES),
    # six units: two blocks and their experts, embedding, head
    "experts": ("tiny_mixtral", Layout(dp=2, **WEIGHTS), (4 * 2 + 2) * MICROBATCHES, 6 * MICROBATCHES),
    "experts alone": (
        "tiny_mixtral",
        Layout(dp=2, shard=Shard.OPTIMIZER, expert_shard="weights"),
        4 + 2 * 2 * MICROBATCHES,
        4 + 2 * MICROBATCHES,
    ),
    "all but experts": (
        "tiny_mixtral",
        Layout(dp=2, expert_shard="optimizer", **WEIGHTS),
        2 + (2 * 2 + 2) * MICROBATCHES,
        2 + 4 * MICROBATCHES,
    ),
}
REPLICATED = {
    "tiny_llama_4": ("tiny_llama_4", Layout(dp=2)),
    "mixed": ("tiny_mixtral", Layout(**MIXED)),
    "mixed weights": ("tiny_mixtral", Layout(**MIXED, **WEIGHTS)),
    "wide": (f"{__file__}:wide_gains", Layout(dp=2, **WEIGHTS)),
}
KEPT = ("allreduce", "sequence_parallel", "tensor_model_parallel", "partition_dim", "partition_stride", "pad_dim")
KEPT = (*KEPT, "constant", "shared")


class WideGain(torch.nn.Module):
    """A product with a gain of 32 bits, in a model of 16."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.empty(channels, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert (x.dtype, self.gain.dtype) == (torch.bfloat16, torch.float32)
        return (x * self.gain).to(x.dtype)


@frozen
class Gain(Layer):
    """x · gain."""

    def body(self, x: Value, /, **side: Value) -> Value:
        return x * weight("gain", x["embed"], mean=1.0)

    def module(self, context: Any) -> torch.nn.Module:
        """Return the module that runs in place of the body."""
        return WideGain(context.config.hidden_size)

    def parameters(self, w: Any) -> dict[str, torch.Tensor]:
        """Return its parameters."""
        return {"gain": w("gain")}


def wide_gains() -> Model:
    table, head = (weight(name, Dim("vocab", 127), Dim("embed", 32)) for name in ("wte", "head"))
    block = residual(RMSNorm(), MLP(48)) >> Gain()
    return model("wide-gains", ids() >> Embed(table) >> repeat(2, block) >> RMSNorm() >> Unembed(head) >> NextToken())


@frozen
class Found:
    """Measurements of a rank."""

    collectives: dict[str, int]  # of the second step
    nbytes: int  # of all tensors after it
    elements: int  # of the weights that the optimizer of this rank has
    of_modules: dict[str, dict[str, Any]]  # attributes of each parameter
    of_rows: dict[str, dict[str, Any]]  # of the rows that the optimizer has


def sample(i: int) -> dict[str, torch.Tensor]:
    return next_token(random_text(i, 127, 32))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the collectives of one tensor, which FSDP uses and DDP does not. torch 2.13 has renamed them."""
    found, originals = Counter[str](), {}

    def counting(what: str, original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            found[what] += 1
            return original(*args, **options)

        return call

    for what, *names in (
        ("gathers", "all_gather_single", "all_gather_into_tensor"),
        ("reductions", "reduce_scatter_single", "reduce_scatter_tensor"),
    ):
        name = next(name for name in names if hasattr(dist, name))
        originals[name] = getattr(dist, name)
        setattr(dist, name, counting(what, originals[name]))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def held() -> int:
    """Bytes of all tensors of this process, each storage once."""
    gc.collect()
    plain = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu"]
    return sum({s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in plain)}.values())


def attributes(p: torch.Tensor) -> dict[str, Any]:
    return {name: getattr(p, name) for name in KEPT if hasattr(p, name)}


def measured(plan: Plan) -> Found:
    """Run twice, since some tensors are made once in a process, and return the measurements of the second run."""
    run(plan)
    return run(plan)


def run(plan: Plan) -> Found:
    from megaloom.runtime.engine.engine import Engine

    before = held()
    engine = Engine.build(plan, model_named(plan.model), RECIPE)
    engine.step(sample)
    with counted() as collectives:
        engine.step(sample)
    engine.evaluate_samples(sample, 3)
    (chunk,), (wrapped,) = engine.model_chunks, engine.state.chunks
    rows = dict(wrapped.named_parameters())
    return Found(
        dict(collectives),
        held() - before,
        sum(p.numel() for p in rows.values()),
        {name: attributes(p) for name, p in chunk.named_parameters()},
        {name.removeprefix("module."): attributes(p) for name, p in rows.items()},
    )


@pytest.fixture(scope="module")
def found(plan_of: Any) -> dict[str, list[Found]]:
    """The measurements of all ranks, by case."""
    cases = {name: case[:2] for name, case in CASES.items()} | REPLICATED
    plans = {name: plan_of(ref, layout, precision="bf16") for name, (ref, layout) in cases.items()}
    return under_layouts(measured, plans)


@pytest.mark.parametrize("case", CASES)
def test_each_unit_is_gathered_and_reduced_as_often_as_the_layout_says(
    case: str, found: dict[str, list[Found]]
) -> None:
    *_, gathers, reductions = CASES[case]
    assert [x.collectives for x in found[case]] == [{"gathers": gathers, "reductions": reductions}] * 2


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_16_bytes_of_each_of_its_elements(case: str, found: dict[str, list[Found]]) -> None:
    """Weights, gradients and moments are fp32; no gathered weight is left."""
    for x in found[case]:
        assert x.nbytes == pytest.approx(16 * x.elements, rel=0.01 if case != "experts" else 0.02)
    whole = found["tiny_llama_4"][0]
    assert whole.nbytes == pytest.approx(18 * whole.elements, rel=0.01)
    assert found["weights"][0].elements == whole.elements / 2


def test_parameters_and_their_rows_keep_all_attributes(found: dict[str, list[Found]]) -> None:
    for x, expected in zip(found["mixed weights"], found["mixed"], strict=True):
        assert x.of_modules == x.of_rows == expected.of_modules
    kinds = {tuple(kept.items()) for kept in found["mixed"][0].of_modules.values()}
    assert len(kinds) > 3


def test_weights_of_another_type_are_units_of_their_own(found: dict[str, list[Found]]) -> None:
    for x in found["wide"]:  # embedding, head, and in each of two blocks the layers and the gain
        assert x.collectives == {"gathers": (2 * 2 * 2 + 2) * MICROBATCHES, "reductions": (2 * 2 + 2) * MICROBATCHES}
        assert x.nbytes == pytest.approx(16 * x.elements, rel=0.02)
