"""Assignment of blocks to pipeline stages by published frameworks."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.accuracy.models.decoder import Decoder
from benchmarks.accuracy.stage_assignment import by_weights, evenly, filled
from megaloom.dsl.graph import Graph, graph


@pytest.fixture(scope="module")
def small() -> Graph:
    """The 1B of nanotron's benchmarks, whose head has as many elements as four of its blocks."""
    return graph(Decoder(layers=16, hidden=2048, heads=32, ffn=8192, vocab=131072, tied_embeddings=True).model())


def blocks(g: Graph, bounds: tuple[int, ...] | None) -> list[int]:
    """Of each stage, how many."""
    assert bounds is not None and {*bounds[1:-1]} <= {*g.cut_points}
    return [len({n.block for n in g.nodes[a:b]} - {None}) for a, b in pairwise(bounds)]


@pytest.mark.parametrize(
    ("stages", "dealt"), [(1, [16]), (2, [11, 5]), (4, [6, 5, 5, 0]), (8, [3, 3, 2, 3, 2, 3, 0, 0])]
)
def test_a_block_that_exceeds_the_share_is_the_last(small: Graph, stages: int, dealt: list[int]) -> None:
    """Shares are 20, 10 and 5 blocks: 5 do not exceed 5, so that a sixth comes, and the head is left to the last. Of 8
    stages, whose shares are 2.5, the last has the loss alone: the norm stays alone instead."""
    assert blocks(small, by_weights(small, stages)) == dealt


def test_what_cannot_be_dealt_has_no_bounds(small: Graph) -> None:
    assert by_weights(small, 16) is None  # the last three stages would have the head and the loss
    assert evenly(small, 5) is None


@pytest.mark.parametrize(
    ("stages", "dealt"), [(8, [2] * 8), (3, [5, 6, 5]), (6, [2, 3, 3, 3, 3, 2]), (18, [0, *[1] * 16, 0])]
)
def test_the_ends_are_a_block_each_if_blocks_alone_do_not_divide(small: Graph, stages: int, dealt: list[int]) -> None:
    assert blocks(small, evenly(small, stages)) == dealt


@pytest.mark.parametrize(("stages", "dealt"), [(3, [5, 6, 5]), (5, [4, 4, 4, 4, 0]), (7, None), (10, None), (11, None)])
def test_stages_are_filled_one_after_the_other(small: Graph, stages: int, dealt: list[int] | None) -> None:
    assert filled(small, stages) is None if dealt is None else blocks(small, filled(small, stages)) == dealt


def test_78_blocks_over_12_stages() -> None:
    """BLOOM's chronicle: "so the last stage has 1 block, while the rest have 7"."""
    g = graph(Decoder(layers=78, hidden=64, heads=4, ffn=64, vocab=128).model())
    assert blocks(g, filled(g, 12)) == [*[7] * 11, 1]


def test_a_layer_is_a_block_though_every_second_one_is_another() -> None:
    """GPT-OSS 120B over 4 stages: 9 layers each, not pairs of them."""
    g = graph(Decoder(layers=36, hidden=64, heads=4, ffn=64, vocab=128, sliding_window=8).model())
    assert blocks(g, evenly(g, 4)) == [9] * 4


def test_several_outputs_are_not_dealt_by_their_number() -> None:
    """DeepSeek-V3 has 61 layers, one for multi-token prediction, and the head's products twice."""
    g = graph(Decoder(layers=5, hidden=64, heads=4, ffn=64, vocab=128, mtp_layers=1).model())
    assert evenly(g, 4) is None
    assert blocks(g, evenly(g, 3)) == [2, 2, 2]
