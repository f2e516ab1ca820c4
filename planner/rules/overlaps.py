"""Rules of overlap: requirements of each kind of overlap on the rest of the layout."""

from __future__ import annotations

from megaloom.planner.contract.choices import Overlap, Shard
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Column, Layouts
from megaloom.planner.contract.workload import Precision, Workload

from .rule import (
    Case,
    L,
    Owner,
    Rule,
    Truth,
    Words,
)


def _off(case: Case[L], overlap: Overlap) -> Truth:
    holds: Truth = case.layout.has_overlap(overlap) == 0
    return holds


def _weights(case: Case[L]) -> Truth:
    x = case.layout
    holds: Truth = _off(case, Overlap.WEIGHTS) | ((x.shard != Shard.NONE) & x.has_overlap(Overlap.GRADIENTS))
    return holds


def _weights_text(case: Case[Layout]) -> Words:
    if not case.layout.shard:
        message = "`--overlap weights` needs `--shard optimizer`, which gathers weights"
        return message, "use --shard optimizer, or leave weights out of `--overlap`"
    return "`--overlap weights` needs `--overlap gradients`", "add gradients to `--overlap`"


def _tensor(case: Case[L]) -> Truth:
    holds: Truth = _off(case, Overlap.TENSOR) | (case.layout.sequence_parallel == 1)
    return holds


def _tensor_text(case: Case[Layout]) -> Words:
    message = "`--overlap tensor` needs sequence parallelism"
    return message, "add --sequence-parallel, or leave tensor out of `--overlap`"


def within_node(tp: int | Column, cluster: Cluster) -> Truth:
    """Return True where the tensor-parallel ranks share a node."""
    return (cluster.nodes == 1) | (cluster.per_node % tp == 0)


def _tensor_node(case: Case[L]) -> Truth:
    return _off(case, Overlap.TENSOR) | within_node(case.layout.tp, case.cluster)


def _tensor_node_text(case: Case[Layout]) -> Words:
    message = f"`--overlap tensor` needs tp within a node of {case.cluster.per_node} devices, got tp {case.layout.tp}"
    return message, f"use tp that divides {case.cluster.per_node}, or leave tensor out of `--overlap`"


def _experts(case: Case[L]) -> Truth:
    return _off(case, Overlap.EXPERTS) | (case.layout.ep > 1)


def _experts_text(case: Case[Layout]) -> Words:
    return "`--overlap experts` needs ep of at least 2, got 1", "use ep 2 or more, or leave experts out of `--overlap`"


def _experts_vpp(case: Case[L]) -> Truth:
    holds: Truth = _off(case, Overlap.EXPERTS) | (case.layout.pp == 1) | (case.layout.vpp > 1)
    return holds


def _experts_vpp_text(case: Case[Layout]) -> Words:
    message = f"`--overlap experts` with pp {case.layout.pp} needs vpp of at least 2"
    return message, "use vpp 2 or more, or leave experts out of `--overlap`"


def _experts_recompute(case: Case[L]) -> Truth:
    holds: Truth = _off(case, Overlap.EXPERTS) | (
        (case.layout.full_recompute == 0) & (case.layout.recompute_layers == 0)
    )
    return holds


def _experts_recompute_text(case: Case[Layout]) -> Words:
    message = "`--overlap experts` cannot be combined with `--recompute full`"
    return message, "use --recompute none or selective, or leave experts out of `--overlap`"


def _at_most_16_bits(workload: Workload) -> bool:
    return workload.precision is not Precision.FP32


def _experts_precision(case: Case[L]) -> Truth:
    return _off(case, Overlap.EXPERTS) | _at_most_16_bits(case.workload)


def _experts_precision_text(case: Case[Layout]) -> Words:
    return "`--overlap experts` does not work in fp32", "use bf16, or leave experts out of `--overlap`"


def _few_multi_token_blocks(x: Layout | Layouts, blocks: int) -> Truth:
    """Return True without multi-token prediction blocks, and for one block with pp above 1."""
    return (blocks == 0) | ((blocks == 1) & (x.pp > 1))


def _experts_multi_token(case: Case[L]) -> Truth:
    return _off(case, Overlap.EXPERTS) | _few_multi_token_blocks(case.layout, case.requirements.multi_token)


def _experts_multi_token_text(case: Case[Layout]) -> Words:
    blocks, off = case.requirements.multi_token, "leave experts out of `--overlap`"
    if blocks > 1:
        return f"`--overlap experts` allows one multi-token prediction block, but the model has {blocks}", off
    return "`--overlap experts` with a multi-token prediction block needs pp above 1", f"use pp 2 or more, or {off}"


def may_overlap_experts(x: Layout | Layouts, multi_token_blocks: int, workload: Workload) -> Truth:
    """Return True where expert overlap is legal, provided that chunks are interleaved and no block is recomputed."""
    return (x.ep > 1) & _at_most_16_bits(workload) & _few_multi_token_blocks(x, multi_token_blocks)


OVERLAP_RULES = (
    Rule(
        id="overlap-weights",
        sentence="`--overlap weights` needs `--shard optimizer` (or more) and `--overlap gradients`.",
        fix="use --shard optimizer and add gradients, or leave weights out of `--overlap`",
        owner=Owner.CALLERS,
        source="Megatron-LM's validate_args",
        holds=_weights,
        explain=_weights_text,
    ),
    Rule(
        id="overlap-tensor",
        sentence="`--overlap tensor` needs `--sequence-parallel`.",
        fix="add --sequence-parallel, or leave tensor out of `--overlap`",
        owner=Owner.CALLERS,
        source="Megatron-LM's validate_args",
        holds=_tensor,
        explain=_tensor_text,
    ),
    Rule(
        id="overlap-tensor-node",
        sentence="`--overlap tensor` needs all tensor-parallel ranks in one node.",
        fix="use tp that divides the devices of a node, or leave tensor out of `--overlap`",
        owner=Owner.PLANNER,
        source="its buffers are in memory that the devices of a node share (Transformer Engine, module/base.py: "
        "initialize_ub)",
        holds=_tensor_node,
        explain=_tensor_node_text,
    ),
    Rule(
        id="overlap-experts",
        sentence="`--overlap experts` needs ep of at least 2.",
        fix="use ep 2 or more, or leave experts out of `--overlap`",
        owner=Owner.CORE,
        source="transformer_config.py:1863",
        holds=_experts,
        explain=_experts_text,
    ),
    Rule(
        id="overlap-experts-vpp",
        sentence="`--overlap experts` with pp above 1 needs vpp of at least 2.",
        fix="use vpp 2 or more, or leave experts out of `--overlap`",
        owner=Owner.CORE,
        source="transformer_config.py:1858",
        holds=_experts_vpp,
        explain=_experts_vpp_text,
    ),
    Rule(
        id="overlap-experts-recompute",
        sentence="`--overlap experts` cannot be combined with `--recompute full`.",
        fix="use --recompute none or selective, or leave experts out of `--overlap`",
        owner=Owner.CORE,
        source="transformer_config.py:1871 and 1877",
        holds=_experts_recompute,
        explain=_experts_recompute_text,
    ),
    Rule(
        id="overlap-experts-precision",
        sentence="`--overlap experts` needs a precision of 16 bits or fewer.",
        fix="use bf16, or leave experts out of `--overlap`",
        owner=Owner.CORE,
        source="transformer_config.py:1882",
        holds=_experts_precision,
        explain=_experts_precision_text,
    ),
    Rule(
        id="overlap-experts-mtp",
        sentence="`--overlap experts` allows at most one multi-token prediction block, and needs pp above 1 for it.",
        fix="use pp 2 or more, or leave experts out of `--overlap`",
        owner=Owner.CORE,
        source="transformer_config.py:1889 and 1893",
        holds=_experts_multi_token,
        explain=_experts_multi_token_text,
    ),
)
