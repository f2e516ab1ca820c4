"""Compare predicted memory with what tools measure, and state how much a rank may need at most."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from statistics import NormalDist

# A rank may hold more than predicted. Of the runs of Megatron's family, 96 of 100 allocated up to 10.7 % more
# (`python -m benchmarks.accuracy validate`). torch reserved up to 7.9 % more than was allocated (SimuMax's runs; where
# memory is free it reserves more, on an H200 up to a third, and where memory is short it does without). CUDA graphs
# have memory of their own: they took up to 0.75 of the saved activations (Hy3's runs).
MODEL_ERROR, RESERVED, GRAPH = 0.107, 0.079, 0.75
NO_TENSOR = ("allocator", "runtime", "graphs")  # holders that are not tensors
# Measured over predicted bytes of tensors, which 19 of 20 runs of Megatron's family on one half of the models stay
# below, by whether they have experts, whose load is not even: table memory-high of docs/accuracy/residuals.md.
TENSORS_HIGH: Mapping[bool, float] = {False: 1.08, True: 1.09}
HIGH_SHARE = 0.95
LEAST_SPREAD = 0.01  # of the logarithm: no calibration knows memory better


def held_bytes(held: Mapping[str, int], kind: str = "device") -> int:
    """Return the bytes of a rank as a tool measures them.

    kind: "allocated" counts tensors, "reserved" what torch's allocator reserves, "device" the whole process.
    """
    left_out = {"allocated": NO_TENSOR, "reserved": ("runtime",)}.get(kind, ())
    return sum(n for holder, n in held.items() if holder not in left_out)


def required_bytes(held: Mapping[str, int]) -> int:
    """Return the bytes below which a rank runs out of memory.

    torch gives its reserve back before it fails (c10/cuda/CUDACachingAllocator.cpp, malloc: release_cached_blocks).
    """
    return held_bytes(held) - held.get("allocator", 0)


def upper_bytes(held: Mapping[str, int], kind: str = "device", graphed: bool = False) -> int:
    """Return the bytes that a rank with this predicted memory should not exceed, as a tool measures them."""
    tensors = held_bytes(held, "allocated") * (1 + MODEL_ERROR)
    if kind == "allocated":
        return int(tensors)
    graphs = GRAPH * held.get("activations", 0) if graphed else 0.0
    return int(tensors * (1 + RESERVED) + graphs) + (held.get("runtime", 0) if kind == "device" else 0)


def needed_bytes(held: Mapping[str, int], high: float) -> int:
    """Return the bytes that a rank needs if its tensors take `high` times what is predicted, without any reserve."""
    tensors = held_bytes(held, "allocated")
    return int(required_bytes(held) - tensors + high * tensors)


def overflow_chance(held: Mapping[str, int], nbytes: int, high: float) -> float:
    """Return the chance that a rank needs more than the bytes of its device.

    Measured over predicted bytes of tensors are taken as log-normal with median 1, and `high` as their upper end.
    """
    tensors = held_bytes(held, "allocated")
    room = nbytes - (required_bytes(held) - tensors)
    if room <= 0 or not tensors:
        return float(room <= 0)
    spread = max(log(high), 0.0) / NormalDist().inv_cdf(HIGH_SHARE)
    return 1 - NormalDist(0.0, max(spread, LEAST_SPREAD)).cdf(log(room / tensors))
