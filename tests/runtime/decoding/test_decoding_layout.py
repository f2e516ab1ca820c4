"""The layout for generation: the fewest devices on which a model fits, and stages of about equal weight."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from unittest import mock

import pytest

from megaloom.dsl import UserError, graph
from megaloom.dsl.catalog import find
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision
from megaloom.runtime.decoding import decoding_layout
from megaloom.runtime.decoding.decoding_graph import DecodingGraph, decoding_graph
from megaloom.runtime.decoding.decoding_layout import (
    Load,
    choose_layout,
    generation_layout,
    stage_bounds,
    stage_nbytes,
    weight_elements,
)

LOAD = Load(rows=1, positions=1024)


def model(name: str) -> DecodingGraph:
    return decoding_graph(graph(find(name)[0]))


@contextmanager
def gpus(count: int, name: str = "NVIDIA H100 80GB HBM3") -> Iterator[None]:
    """Pretend that this machine has GPUs."""
    with (
        mock.patch.object(decoding_layout.device, "gpu_count", return_value=count),
        mock.patch.object(decoding_layout.device, "gpu_name", return_value=name),
    ):
        yield


def chosen(name: str, count: int, tp: int | None = None, pp: int | None = None, load: Load = LOAD) -> Layout:
    with gpus(count):
        return choose_layout(model(name), load, Precision.BF16, tp, pp)


def test_the_fewest_devices_are_chosen() -> None:
    assert chosen("llama3-8b", 8) == generation_layout(1, 1)  # 15 GiB of weights
    assert chosen("llama3-70b", 8) == generation_layout(2, 1)  # 131 GiB
    assert chosen("llama3-70b", 8, tp=1).pp in (2, 3)
    assert chosen("llama3-70b", 8, pp=2) == generation_layout(1, 2)
    assert chosen("llama3-70b", 8, load=Load(rows=64, positions=4096)) == generation_layout(4, 1)  # 80 GiB of keys
    assert chosen("llama3-8b", 1, tp=4, pp=2) == generation_layout(4, 2)  # as asked


def test_a_model_without_room_is_refused() -> None:
    with pytest.raises(UserError, match=r"llama3-405b does not fit: .* needs .* GiB on each device"):
        chosen("llama3-405b", 8)


def test_cpu_processes_share_their_memory() -> None:
    with gpus(0):
        assert choose_layout(model("llama3-70b"), LOAD, Precision.FP32, None, None) == generation_layout(1, 1)


@pytest.mark.parametrize("name", ["llama3-8b", "t5-base", "mixtral-8x7b"])
def test_stages_have_about_equal_weights(name: str) -> None:
    g, layout = model(name), generation_layout(2, 4)
    bounds = stage_bounds(g, layout)
    assert bounds[0] == 0 and bounds[-1] == len(g.nodes) and sorted(set(bounds)) == list(bounds)
    each = [weight_elements(n, layout.split) for n in g.nodes]
    parts = [sum(each[a:b]) for a, b in pairwise(bounds)]
    assert max(parts) - min(parts) <= 2 * max(each)
    assert stage_nbytes(g, layout, LOAD, Precision.BF16) >= 2 * max(parts)
