"""The shard policy of a dim: the facts count what the runtime holds, for every degree of tp and etp."""

from collections.abc import Callable
from itertools import product

import pytest

from megaloom.dsl import costs
from megaloom.dsl.catalog import find
from megaloom.dsl.graph import graph
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.launch import launcher
from tests.support.limits import LIMIT
from tests.support.paths import TEST_MODELS

FILE = TEST_MODELS / "own_layers.py"
MODELS = ("squared_510", "squared_512", "hashed_odd")
DEGREES = (1, 2, 4)
Counts = dict[tuple[str, int, int], dict[str, tuple[int, int]]]  # (model, tp, etp) → node → dense and expert parameters


def cases() -> list[tuple[str, int, int]]:
    return [(name, tp, etp) for name, tp, etp in product(MODELS, DEGREES, DEGREES) if name != "hashed_odd" or etp == 1]


def layout(tp: int, etp: int) -> Layout:
    return Layout(dp=4 // tp, tp=tp, etp=etp, sequence_parallel=tp > 1)


def parameter_counts(plans: dict[str, Plan]) -> Counts:
    """Return the parameters that this rank holds of each node."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megaloom.runtime.megatron.build_context import make_build_context
    from megaloom.runtime.megatron.process_groups import create_process_groups
    from megaloom.runtime.modules import registry

    out: Counts = {}
    for name, tp, etp in cases():
        plan, g = plans[name], graph(find(plans[name].model)[0])
        groups = create_process_groups(layout(tp, etp))
        context = make_build_context(g, layout(tp, etp), plan.workload, groups)
        model_parallel_cuda_manual_seed(0)
        out[name, tp, etp] = counts = {}
        for n in (n for n in g.nodes if not n.is_input):
            parameters = list(registry.build_module(n, context).parameters())
            experts = sum(p.numel() for p in parameters if not getattr(p, "allreduce", True))
            counts[n.name] = sum(p.numel() for p in parameters) - experts, experts
        parallel_state.destroy_model_parallel()
    return out


@pytest.fixture(scope="module")
def ranks(plan_of: Callable[..., Plan]) -> list[Counts]:
    plans = {name: plan_of(f"{FILE}:{name}", Layout(), batch=4, seq=32) for name in MODELS}
    return launcher.run(parameter_counts, (plans,), 4, timeout=LIMIT)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_rank_holds_the_parameters_that_the_facts_count(case: tuple[str, int, int], ranks: list[Counts]) -> None:
    name, tp, etp = case
    split = layout(tp, etp).split
    for n in graph(find(f"{FILE}:{name}")[0]).nodes:
        if not n.is_input:
            result = costs(n, batch=1, seq=32, split=split)
            assert [rank[case][n.name] for rank in ranks] == [(result.params, result.expert_params)] * 4, n.name
