"""Compare predicted memory with what tools measure, and state how much more a rank may hold."""

from __future__ import annotations

from collections.abc import Mapping

from megaloom.planner.contract.calibration import Calibration

# A rank may hold more than predicted. Of the runs of Megatron's family, 96 of 100 allocated up to 10.7 % more
# (`python -m benchmarks.accuracy validate`). torch reserved up to 7.9 % more than was allocated (SimuMax's runs; where
# memory is free it reserves more, on an H200 up to a third, and where memory is short it does without). CUDA graphs
# have memory of their own: they took up to 0.75 of the saved activations (Hy3's runs).
MODEL_ERROR, RESERVED, GRAPH = 0.107, 0.079, 0.75
NO_TENSOR = ("allocator", "runtime", "graphs")  # holders that are not tensors


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


def upper_bytes(
    held: Mapping[str, int], kind: str = "device", graphed: bool = False, calibration: Calibration | None = None
) -> int:
    """Return the bytes that a rank with this predicted memory should not exceed, as a tool measures them.

    calibration: of the cluster; the upper end of its tensors replaces that of published runs, if its logs have one.
    """
    high = calibration.memory_high if calibration else None
    tensors = held_bytes(held, "allocated") * (1 + MODEL_ERROR if high is None else high)
    if kind == "allocated":
        return int(tensors)
    graphs = GRAPH * held.get("activations", 0) if graphed else 0.0
    return int(tensors * (1 + RESERVED) + graphs) + (held.get("runtime", 0) if kind == "device" else 0)
