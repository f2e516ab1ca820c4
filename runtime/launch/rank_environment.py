"""The environment variables of ranks: threads, connections to the GPU, and torch's allocator."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from megaloom.planner.contract.layout import Layout
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.host import usable_cores

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Connections of a process to a GPU. Kernels of streams that share one run in the order of their launch."""


@contextlib.contextmanager
def rank_environment(threads: int, layout: Layout | None = None) -> Iterator[None]:
    """Set the variables of ranks that are unset, for processes started inside the context.

    layout: that of the ranks, if they have one.

    OpenMP and CUDA read them when a spawned rank loads them, before our code runs.
    """
    variables = {"OMP_NUM_THREADS": str(threads), CONNECTIONS: connections(layout)} | allocator_variables()
    with default_variables(variables):
        yield


def connections(layout: Layout | None) -> str:
    """Return the connections of a rank of a layout to its GPU, as the variable `CONNECTIONS` has them.

    One, which overlapped collectives of tp and cp need; with sharded weights or gradients CUDA's usual 8, as their
    collectives have streams of their own. Llama 3 8B on two H100, weights sharded: a step of 1,450 ms with 8
    connections takes 1,620 ms with one.
    """
    return "8" if layout is not None and layout.fsdp else "1"


def world_of(ranks: int | Layout) -> int:
    """Return the number of ranks, which is given, or is that of a layout."""
    return ranks if isinstance(ranks, int) else ranks.world


@contextlib.contextmanager
def default_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the context, unless they are set already."""
    unset = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(unset)
    try:
        yield
    finally:
        for name in unset:
            del os.environ[name]


def allocator_variables() -> dict[str, str]:
    """Return the variables by which torch's allocator on GPUs extends segments, so that fragments can join.

    Without them a request of 12 GiB failed beside 9 GiB of fragments. None if the user set one. torch before 2.9 reads
    the second name only.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if not device.gpu_count() or any(name in os.environ for name in names):
        return {}
    return dict.fromkeys(names, "expandable_segments:True")


def threads_per_rank(world: int) -> int:
    """Return the threads per rank, so that all ranks together use no more than the available cores."""
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, usable_cores() // world))
