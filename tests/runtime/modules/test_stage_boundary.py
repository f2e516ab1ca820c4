"""Stage boundaries: packed and unpacked values, and the bytes of each send that plans price."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from megaloom.dsl import Split, graph
from megaloom.dsl.catalog import find
from megaloom.dsl.dims import Sizes
from megaloom.dsl.facts.primitives import output_elements
from megaloom.planner.model.structure import model_structure
from megaloom.runtime.megatron import device
from tests.support.models.small import tiny_llava, tiny_pair

device.prepare()

from megaloom.runtime.modules.stage_boundary import StageBoundary  # noqa: E402

SEQ = 32


def test_values_of_several_widths_and_lengths_are_packed_into_one_tensor() -> None:
    g = graph(tiny_pair())
    node = next(i for i in g.cut_points if len(g.live_values[i]) > 1)
    boundary = StageBoundary.of(g, node, Split(tp=2, sequence_parallel=True), SEQ)
    assert boundary.shapes == ((12, -1, 32), (16, -1, 64))  # the memory, and what the decoder begins with
    values = {
        name: torch.randn(shape[0], 3, shape[2]) for name, shape in zip(boundary.names, boundary.shapes, strict=True)
    }
    packed = boundary.pack(values)
    assert packed.shape == (3 * sum(boundary.elements),)
    for name, value in boundary.unpack(packed).items():
        assert torch.equal(value, values[name])


def test_a_single_value_is_sent_as_a_copy_that_can_be_freed() -> None:
    g = graph(tiny_llava())
    boundary = StageBoundary.of(g, g.cut_points[0], Split(), SEQ)
    value = torch.randn(9, 2, 32)
    packed = boundary.pack({boundary.names[0]: value})
    assert packed._base is None  # the schedules refuse to free a view
    assert packed.data_ptr() != value.data_ptr()
    assert torch.equal(packed, value.reshape(-1))


def test_nothing_crosses_the_ends_of_a_model() -> None:
    g = graph(tiny_llava())
    assert [StageBoundary.of(g, node, Split(), SEQ).names for node in (0, len(g.nodes))] == [(), ()]


@pytest.mark.parametrize("ref", ["llama3-8b", "t5-small", "bart-base", "llava-7b", "vit-base", "deepseek-v3-mtp"])
@pytest.mark.parametrize(
    "split", [Split(), Split(tp=2), Split(tp=2, sequence_parallel=True), Split(tp=4, cp=2, sequence_parallel=True)]
)
def test_a_plan_prices_what_the_runtime_sends(ref: str, split: Split) -> None:
    g = graph(find(ref)[0])
    shapes, crossing = model_structure(g).live_shapes
    priced = crossing @ output_elements(shapes, Sizes(batch=3, seq=1024, source=1024), split)
    for node in g.cut_points:
        assert priced[node] == 3 * sum(StageBoundary.of(g, node, split, 1024).elements) > 0
    for a, b in pairwise((0, *g.cut_points)):
        assert not priced[a + 1 : b].any()
