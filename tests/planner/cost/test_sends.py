"""Sends between stages carry all live hidden states, each with its own width and length."""

from __future__ import annotations

import pytest

from megaloom.dsl import graph
from megaloom.dsl.catalog import find
from megaloom.dsl.dims import Sizes
from megaloom.dsl.facts.primitives import output_elements
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.cost import communication
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.model.structure import model_structure
from megaloom.planner.partition.partitioner import Partition, PartitionProblem
from megaloom.planner.search.pricing import Pricer


def boundary_nbytes(ref: str, split_over: Layout) -> dict[tuple[str, ...], int]:
    """Return the bytes in bf16 that cross the boundary before each cut point, by the names of the values."""
    g = graph(find(ref)[0])
    shapes, crossing = model_structure(g).live_shapes
    elements = crossing @ output_elements(shapes, Sizes(batch=2, seq=512, source=512), split_over.split)
    return {g.live_values[i]: 2 * int(elements[i]) for i in g.cut_points}


def test_a_decoder_sends_the_memory_with_its_own_hidden_states() -> None:
    one = 2 * 2 * 512 * 512  # bf16, two sequences of 512 tokens of width 512
    assert {(len(names), nbytes) for names, nbytes in boundary_nbytes("t5-small", Layout()).items()} == {
        (1, one),
        (2, 2 * one),
    }
    sharded = Layout(tp=2, cp=2, sequence_parallel=True)
    assert {*boundary_nbytes("t5-small", sharded).values()} == {one // 4, one // 2}


def test_patches_and_text_have_their_own_widths() -> None:
    patches, rest, text = (2 * 2 * positions * width for positions, width in ((577, 1024), (576, 4096), (512, 4096)))
    found = {*boundary_nbytes("llava-7b", Layout()).values()}
    assert {patches, text, rest + text} <= found
    whole = boundary_nbytes("llava-7b", Layout(tp=2, sequence_parallel=True)).values()
    assert {patches, text // 2, rest + text // 2} <= {*whole}  # patches are not divided


@pytest.mark.parametrize("ref", ["t5-base", "llava-7b"])
def test_each_send_takes_the_time_of_its_own_bytes(ref: str) -> None:
    x, machine = Layout(pp=16, micro_batch=2), cluster("16xH100")
    pricer = Pricer(graph(find(ref)[0]), machine, Workload(seq=512, batch=32))
    problem = PartitionProblem(x, pricer.cost_table(x), pricer.capacity)
    placed, sent = Partition(problem, problem.balanced), boundary_nbytes(ref, Layout())
    names = [pricer.structure.graph.live_values[i] for i in placed.bounds[1:-1]]
    seconds = [communication.p2p_seconds(sent[each], k, x, machine, scattered=False) for k, each in enumerate(names)]
    assert placed.send_seconds == seconds
    assert len({*seconds}) > 1
