"""The parameters that a plan counts for each stage are those that the runtime makes there."""

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from multiprocessing import get_context
from runpy import run_path
from typing import Any

import pytest

from megaloom.dsl.catalog import find
from megaloom.dsl.graph import graph
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.launch import launcher
from tests.support.limits import LIMIT
from tests.support.paths import ROOT, TEST_MODELS

OWN = f"{TEST_MODELS / 'own_layers.py'}:some_experts"
ONE_HEAD = f"{TEST_MODELS / 'own_layers.py'}:one_kv_head"
SHARED = f"{TEST_MODELS / 'shared_weights.py'}"
LAYOUTS = {
    "whole": ("tiny_gpt", Layout(dp=4)),
    "vocabulary padded": ("tiny_gpt", Layout(dp=2, tp=2, sequence_parallel=True)),
    "tied over stages": ("tiny_gpt", Layout(pp=4)),
    "tied over chunks": ("tiny_gpt", Layout(tp=2, pp=2, vpp=2)),
    "shared by blocks, over stages": (f"{SHARED}:albert", Layout(pp=4)),
    "shared by blocks, over chunks": (f"{SHARED}:albert", Layout(pp=2, vpp=2, dp=2)),
    "shared by blocks, vocabulary padded": (f"{SHARED}:albert", Layout(pp=2, vpp=2, tp=2)),
    "built-in layers shared by blocks": (f"{SHARED}:albert_blocks", Layout(pp=2, vpp=2, tp=2)),
    "a buffer shared": (f"{SHARED}:positions_again", Layout(pp=2, vpp=2, dp=2)),
    "shared by experts": (f"{SHARED}:sharing_experts", Layout(pp=2, vpp=2, dp=2)),
    "an encoder and a decoder": (f"{SHARED}:tiny_t5", Layout(dp=2, tp=2)),
    "an own table for the logits": ("tiny_llama", Layout(tp=2, pp=2)),
    "fewer key/value heads than devices": ("tiny_llama", Layout(tp=4, sequence_parallel=True)),
    "fewer key/value heads than devices, by a body": (ONE_HEAD, Layout(tp=4, sequence_parallel=True)),
    "parts of the sequence": ("tiny_llama", Layout(cp=2, pp=2)),
    "experts": ("tiny_mixtral", Layout(dp=4, ep=4)),
    "own experts": (OWN, Layout(dp=2, tp=2, ep=4, sequence_parallel=True)),
    "parts of experts": ("tiny_mixtral", Layout(dp=2, tp=2, ep=2, etp=2, sequence_parallel=True)),
}


def built(plans: dict[str, Plan]) -> dict[str, list[int]]:
    """On each rank: the elements of the parameters of each of its stages."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megaloom.runtime.megatron.build_context import make_build_context
    from megaloom.runtime.megatron.process_groups import create_process_groups
    from megaloom.runtime.modules.model_chunk import ModelChunk
    from megaloom.runtime.modules.shared_weights import share_between_chunks

    out = {}
    for what, plan in plans.items():
        m, _ = find(plan.model)
        g, groups = graph(m), create_process_groups(plan.layout)
        context = make_build_context(g, plan.layout, plan.workload, groups)
        model_parallel_cuda_manual_seed(0)
        mine = [chunk for chunk in plan.stages if chunk.rank == groups.pp_rank]
        stages = [ModelChunk(g, chunk, context) for chunk in mine]
        share_between_chunks([stage.shared for stage in stages])
        out[what] = [sum(p.numel() for p in stage.parameters()) for stage in stages]
        parallel_state.destroy_model_parallel()
    return out


@pytest.fixture(scope="module")
def plans(plan_of: Callable[..., Any]) -> dict[str, Plan]:
    return {what: plan_of(name, layout) for what, (name, layout) in LAYOUTS.items()}


@pytest.fixture(scope="module")
def counts(plans: dict[str, Plan]) -> list[dict[str, list[int]]]:
    return launcher.run(built, (plans,), 4, timeout=LIMIT)


@pytest.mark.parametrize("what", LAYOUTS)
def test_a_device_holds_the_parameters_that_the_plan_counts(
    what: str, plans: dict[str, Plan], counts: list[dict[str, list[int]]]
) -> None:
    planned = plans[what].stages
    width = 4 // plans[what].layout.pp  # pipeline ranks are outermost
    for rank, counts_of_rank in enumerate(counts):
        assert counts_of_rank[what] == [s.params for s in planned if s.rank == rank // width]


def compared() -> str:
    """The output of the benchmark, in a process of its own: it lets nothing take memory."""
    with redirect_stdout(StringIO()) as out:
        run_path(str(ROOT / "benchmarks" / "built.py"))["main"]("4", "3")
    return out.getvalue()


def test_what_searches_find_is_built_as_planned() -> None:
    """The best plans of some searches of the benchmark, of published sizes. `make parity` builds those of all."""
    with get_context("fork").Pool(1) as pool:
        output = pool.apply_async(compared).get(LIMIT)
    assert output.endswith("\n12 plans, 0 differences\n"), output
