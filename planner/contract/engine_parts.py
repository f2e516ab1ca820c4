"""Parts of layers that Transformer Engine has modules of, and where it computes them in Megaloom's own runtime.

A row of `module_kinds` names the parts that its module consists of; what is not named stays torch's or megatron-core's.
`capability` decides by `engine_parts`, and the runtime builds what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

from megaloom.dsl import Attention, Node, Split

from .workload import Precision

ENGINE_PRECISIONS = (Precision.BF16, Precision.FP8)
"""Transformer Engine multiplies fp32 in TF32 and has no fused attention for it; fp16 has not been tried."""
NARROW_ROWS = 16  # every dim of a product in fp8 is a multiple of it (Transformer Engine, assert_dim_for_fp8_exec)
ATTENTION_CHANNELS = 8  # of a head: a multiple of it (cuDNN's fused attention)
LARGEST_HEAD = 128  # channels of a head; for more, the backward pass needs a Hopper device


class EnginePart(Enum):
    """A part of a module that Transformer Engine can compute. The value names it in the lines of a run."""

    ATTENTION = "attention"
    EXPERTS = "experts"
    LINEAR = "linear layers in fp8"


NO_PARTS: frozenset[EnginePart] = frozenset()
"""Of layers of which Transformer Engine has nothing, or nothing faster.

In bf16 its norms and linear layers took as long as torch's, on an H100 (docs/accuracy/gpu_runs.md).
"""


def engine_parts(parts: frozenset[EnginePart], node: Node, split: Split, precision: Precision) -> frozenset[EnginePart]:
    """Return those parts of a node's module that Transformer Engine computes under a split, in a precision.

    Of linear layers in bf16 its kernels are no faster than torch's. Its experts in fp8 have not been tried.
    """
    if precision not in ENGINE_PRECISIONS:
        return NO_PARTS
    without = EnginePart.EXPERTS if precision.narrow else EnginePart.LINEAR
    return frozenset(part for part in parts - {without} if _COMPUTES[part](node, split))


def precision_for_engine(precision: Precision) -> str:
    """Return why Transformer Engine computes nothing in a precision; empty if it computes there."""
    if precision in ENGINE_PRECISIONS:
        return ""
    reason = "multiplies fp32 in TF32" if precision is Precision.FP32 else f"has not been tried in {precision}"
    return f"Transformer Engine {reason}"


def _goes_around_a_ring(node: Node, split: Split) -> bool:
    """True for causal attention over context-parallel ranks alone, which exchanges keys and values while it computes.

    On one rank torch has the same kernels of cuDNN, and takes as long. The masks of dropout are torch's. Beside tp, and
    without a causal mask, it has not been tried.
    """
    op: Any = node.op
    channels = node.shape["embed"].known // op.heads if op.head_dim is None else op.head_dim
    fused = channels % ATTENTION_CHANNELS == 0 and channels <= LARGEST_HEAD
    return fused and split.cp > 1 and split.tp == 1 and op.causal and not op.dropout


def _holds_whole_experts(node: Node, split: Split) -> bool:
    """True if a device has all rows of its experts' weights. Sharded by etp, it has not been tried.

    `capability` leaves small experts to torch, which multiplies by all of them in one kernel.
    """
    return split.etp == 1


def _multiplies_whole_tiles(node: Node, split: Split) -> bool:
    """True if each device's part of the weights has numbers of rows and columns that products in fp8 can have."""
    op: Any = node.op
    width = node.shape["embed"].known
    if isinstance(op, Attention):
        head = width // op.heads if op.head_dim is None else op.head_dim
        kv_heads = op.heads if op.kv_heads is None else op.kv_heads
        sizes = [width, op.heads // split.tp * head, (op.heads + 2 * kv_heads) // split.tp * head]
    else:
        sizes = [width, op.ff // split.tp]
    return all(size % NARROW_ROWS == 0 for size in sizes)


_COMPUTES: Mapping[EnginePart, Callable[[Node, Split], bool]] = MappingProxyType(
    {
        EnginePart.ATTENTION: _goes_around_a_ring,
        EnginePart.EXPERTS: _holds_whole_experts,
        EnginePart.LINEAR: _multiplies_whole_tiles,
    }
)
"""For each part, whether Transformer Engine computes it in a layer whose row names it."""
