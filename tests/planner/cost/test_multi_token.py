"""Plans of models with multi-token prediction, whose last block and heads may have stages of their own."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from attrs import evolve

from megaloom.dsl import (
    Graph,
    Model,
    MoE,
    SwiGLU,
    UserError,
    graph,
    params,
)
from megaloom.examples.deepseek import deepseek, deepseek_v3_mtp
from megaloom.examples.t5 import t5
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.cost.columns import STEP_COLUMNS, CostColumn
from megaloom.planner.cost.profiles.frameworks import MEGATRON, OWN
from megaloom.planner.export.decoder import read_decoder
from megaloom.planner.export.export import export_plan
from megaloom.planner.export.target import Target
from megaloom.planner.export.whole_layers import cut_at_layers, pipeline_layout, stage_layers
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.partition.partitioner import Partition, PartitionProblem
from megaloom.planner.rules.capabilities import untrainable
from megaloom.planner.search.pricing import Pricer
from megaloom.runtime.megatron import device
from tests.support.exported import plan_with
from tests.support.models.small import LATENT, tiny_llava
from tests.support.profiles import changed

MOE = MoE(SwiGLU(32), 8, 4, shared=SwiGLU(32))
SMALL = deepseek("small", LATENT, 64, ff=96, moe=MOE, dense=1, sparse=6, vocab=512, mtp_layers=1)
CHUNKS = [(pp, vpp) for pp in range(1, 9) for vpp in range(1, 6) if (vpp == 1 or pp > 1) and pp * vpp <= 16]
WORK = Workload(seq=64, batch=16)


def pricer(g: Graph, count: int, work: Workload = WORK) -> Pricer:
    return Pricer(g, cluster(f"{count}xH100"), work)


def theirs() -> Any:
    """Megatron-core's class that reads where stages begin."""
    device.prepare()
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    return PipelineParallelLayerLayout


# By hand, in the notation of megatron-core's pipeline_model_parallel_layout, each with its pp and vpp:
# - megatron-core's own example (transformer_config.py), and Megatron-LM's tests/unit_tests/…/test_pipeline_layout.py;
# - Megatron-Bridge's recipe (recipes/deepseek/deepseek_v3.py): the even ones, and with mtp_standalone those of "m|L";
# - its benchmarks (scripts/performance/configs/deepseek/deepseek_workload_base_configs.py): H100, B200, GB200, GB300;
# - Megatron-MoE-ModelZoo, best_practice/DeepSeekV3/run.sh: 256 H100 at 4k to 128k tokens.
BY_HAND = [
    ("Et*3|(tt|)*29m|L", 16, 2),
    ("Et*2|(tt|)*29t|mL", 16, 2),
    ("Et|(tt|)*30mL", 8, 4),
    ("Et*2|(tt|)*22t|(tt|)*7mL", 8, 4),
    ("Et*4|(t*4|)*14tmL", 16, 1),
    ("Et*4|(t*4|)*14tmL", 8, 2),
    ("Et*4|(t*4|)*14tmL", 4, 4),
    ("Et*4|(t*4|)*14tmL", 2, 8),
    ("Et*8|(t*8|)*6t*5mL", 8, 1),
    ("Et*8|(t*8|)*6t*5mL", 4, 2),
    ("Et*16|(t*16|)*2t*13mL", 4, 1),
    ("Et*5|(t*5|)*4(t*4|)*9m|L", 16, 1),
    ("Et*5|(t*5|)*4(t*4|)*9m|L", 4, 4),
    ("Et*11|(t*10|)*5m|L", 4, 2),
]


@pytest.mark.parametrize(("by_hand", "pp", "vpp"), BY_HAND)
def test_the_slowest_chunk_of_deepseek_v3_is_no_slower_than_by_hand(by_hand: str, pp: int, vpp: int) -> None:
    g = graph(deepseek_v3_mtp())
    x = Layout(pp=pp, vpp=vpp, dp=1024 // pp, ep=64)
    placed = pricer(g, x.world, Workload(seq=4096, batch=16 * x.dp)).partition(x)
    units = [sum(unit.name != "embedding" for unit in one) for one in theirs().parse_str_to_list(by_hand)]
    starts = read_decoder(g, Target.MEGATRON_LM).layer_starts
    assert sum(units) == len(starts) == 63
    bounds = (0, *(starts[n] for n in accumulate(units[:-1])), len(g.nodes))
    rival = placed.problem.table.stage_sums(bounds)[:, STEP_COLUMNS].sum(axis=1)
    assert len(rival) == len(placed.seconds) == pp * vpp
    assert max(placed.seconds) <= rival.max() * (1 + 1e-9)


@pytest.mark.parametrize(("model", "alone"), [(SMALL, True), (deepseek_v3_mtp(), False)], ids=["small", "large"])
def test_megatron_core_takes_the_stages(model: Model, alone: bool) -> None:
    """The multi-token prediction block is in one stage: the last chunk of its rank, after all other blocks."""
    g, result = graph(model), set[bool]()
    read = read_decoder(g, Target.MEGATRON_LM)
    for pp, vpp in CHUNKS:
        x = Layout(pp=pp, vpp=vpp)
        of = pricer(g, pp)
        fit = PartitionProblem(x, of.cost_table(x), of.capacity, whole_blocks=True)
        if pp * vpp < len(fit.cut_points):
            stages = stage_layers(plan_with(model, x, cuts=fit.balanced[1:-1]), read, g, Target.MEGATRON_LM)
            expected = theirs()(pipeline_layout(stages), pp)
            assert expected.validate_layer_layout(len(read.layers), 1) == (stages[-1].mtp == 0)
            result.add(stages[-1].mtp == 0)
    assert result == {False, alone}  # heads alone are some of the even stages


def test_the_embedding_is_there_again_and_its_gradients_are_added_up() -> None:
    g = graph(SMALL)
    for pp in (2, 3, 4):
        priced = pricer(g, pp).price(Layout(pp=pp))
        assert sum(s.params for s in priced.stages) == params(SMALL) + 512 * 64
        assert [tail.tied > 0 for tail in priced.ends_of_step] == [r in (0, pp - 1) for r in range(pp)]
    alone = pricer(g, 1).price(Layout())
    assert alone.stages[0].params == params(SMALL)
    assert alone.ends_of_step[0].tied == 0


def test_two_hidden_states_cross_into_the_heads() -> None:
    """Two hidden states are sent to the heads, saved for the backward pass, and counted in the receive buffers."""
    g = graph(SMALL)
    result, starts = pricer(g, 4), read_decoder(g, Target.MEGATRON_LM).layer_starts
    fit = result.partition(Layout(pp=4)).problem
    cuts = [(0, starts[2], starts[4], end, len(g.nodes)) for end in starts[-2:]]
    one, two = (Partition(fit, bounds) for bounds in cuts)
    state = 64 * 64 * 2  # of a sequence: 64 tokens of 64 numbers in bf16
    hops = [placed.send_seconds for placed in (one, two)]
    link = cluster("4xH100").intra
    assert hops[0][2] == pytest.approx(link.latency + state / link.reached)
    assert hops[1][2] == pytest.approx(link.latency + 2 * state / link.reached)
    assert hops[0][:2] == hops[1][:2]
    mine = fit.table.stage_sums(two.bounds)[-1]
    assert two.stages[-1].saved == int(mine[CostColumn.SAVED]) + 2 * state
    assert two.stages[-1].library - two.stages[-2].library == 3 * state


@pytest.mark.parametrize(
    "g",
    [graph(SMALL), graph(t5("pair", 4, 4, 64, SwiGLU(96), head_dim=16, vocab=512)), graph(tiny_llava())],
    ids=["ahead", "encoder", "image"],
)
def test_what_the_search_asks_of_a_cut_holds_where_several_hidden_states_cross(g: Graph) -> None:
    crossed = 0
    for (pp, vpp), profile in (
        (c, p) for c in CHUNKS for p in (OWN, changed(MEGATRON, optimizer={"step_held_nbytes": 16}))
    ):
        x, work = Layout(pp=pp, vpp=vpp), Workload(seq=64, batch=2 * pp)
        of = pricer(g, pp, work)
        fit = PartitionProblem(x, of.cost_table(x), of.capacity)
        for bounds in (
            fit.balanced,
            evolve(fit, whole_blocks=pp * vpp < len(of.structure.block_cut_points)).balanced,
        ):
            placed = Partition(fit, bounds)
            crossed += (
                len({len(g.live_values[i]) for i in bounds[1:-1]} | {int(n) for n in fit.received[[*bounds[1:-1]]]}) > 1
            )
            assert placed.deficit == pytest.approx(max(placed.peaks) - placed.problem.memory_limit, abs=100)
            seconds, nbytes = of.bound(x)
            if profile is OWN:
                priced = of.simulate(placed)
                assert seconds <= priced.seconds * (1 + 1e-9)
                assert nbytes <= max(priced.partition.peaks) + 1000
    assert crossed > 5


def test_what_predicts_ahead_is_computed_again_with_all_blocks_only() -> None:
    """Not with the first ones of each stage: megatron-core skips it then."""
    g = graph(SMALL)
    starts = read_decoder(g, Target.MEGATRON_LM).layer_starts
    again = {}
    for layers in (0, 1, 2):
        x = Layout(pp=3, recompute=Recompute.FULL, recompute_layers=layers)
        bounds = (0, starts[4], starts[6], len(g.nodes))  # the last: a layer, that ahead, the heads
        again[layers] = pricer(g, 3).partition(x).problem.table.stage_sums(bounds)[:, CostColumn.RECOMPUTE]
    assert again[1][2] == again[2][2] == pytest.approx(again[2][1] / 2)
    assert again[0][2] > again[2][1]


def test_the_runtime_trains_it() -> None:
    assert untrainable(graph(SMALL)) is None


def test_two_chunks_of_a_rank_with_one_embedding_are_refused() -> None:
    """With pp 2 the multi-token prediction block has a stage of the first rank if the heads have one of their own."""
    starts = read_decoder(graph(SMALL), Target.MEGATRON_LM).layer_starts
    alone, together = (*starts[2:4], starts[-2], starts[-1]), (*starts[2:5], starts[-2])
    x = Layout(pp=2, vpp=2)
    refused = plan_with(SMALL, x, cuts=alone[1:])
    with pytest.raises(UserError, match=r"two chunks of one rank use the weight 'wte'.*\[shared-chunks\]"):
        export_plan(refused, SMALL, Target.MEGATRON_LM)
    for plan in (
        plan_with(SMALL, x, cuts=together[1:]),
        cut_at_layers(refused, SMALL, read_decoder(graph(SMALL), Target.MEGATRON_LM)),
    ):
        assert "mL" in export_plan(plan, SMALL, Target.MEGATRON_LM)
