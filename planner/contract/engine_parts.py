"""Parts of layers that Transformer Engine has modules of, and where it computes them in Megaloom's own runtime.

A row of `module_kinds` names the parts that its module consists of; what is not named stays torch's or megatron-core's.
`capability` decides by `engine_parts`, and the runtime builds what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

from megaloom.dsl import Node

from .workload import Precision

ENGINE_PRECISIONS = (Precision.BF16,)
"""Transformer Engine multiplies fp32 in TF32 and has no fused attention for it; fp16 has not been tried."""
ATTENTION_CHANNELS = 8  # of a head: a multiple of it (cuDNN's fused attention)
LARGEST_HEAD = 128  # channels of a head; for more, the backward pass needs a Hopper device


class EnginePart(Enum):
    """A part of a module that Transformer Engine can compute. The value names it in the lines of a run."""

    ATTENTION = "attention"
    EXPERTS = "experts"


NO_PARTS: frozenset[EnginePart] = frozenset()
"""Of layers of which Transformer Engine has nothing, or nothing that is faster.

In bf16 its norms and linear layers took as long as torch's, on an H100 (docs/accuracy/gpu_runs.md).
"""


def engine_parts(parts: frozenset[EnginePart], node: Node, precision: Precision) -> frozenset[EnginePart]:
    """Return those parts of a node's module that Transformer Engine computes in a precision."""
    if precision not in ENGINE_PRECISIONS:
        return NO_PARTS
    return frozenset(part for part in parts if _COMPUTES[part](node))


def precision_for_engine(precision: Precision) -> str:
    """Return why Transformer Engine computes nothing in a precision; empty if it computes there."""
    if precision in ENGINE_PRECISIONS:
        return ""
    reason = "multiplies fp32 in TF32" if precision is Precision.FP32 else f"has not been tried in {precision}"
    return f"Transformer Engine {reason}"


def _has_fused_attention(node: Node) -> bool:
    """True for attention that cuDNN's kernels compute. The masks of dropout are torch's under every backend."""
    op: Any = node.op
    channels = node.shape["embed"].known // op.heads if op.head_dim is None else op.head_dim
    return channels % ATTENTION_CHANNELS == 0 and channels <= LARGEST_HEAD and not op.dropout


def _always(node: Node) -> bool:
    return True


_COMPUTES: Mapping[EnginePart, Callable[[Node], bool]] = MappingProxyType(
    {
        EnginePart.ATTENTION: _has_fused_attention,
        EnginePart.EXPERTS: _always,
    }
)
"""For each part, whether Transformer Engine computes it in a layer whose row names it."""
