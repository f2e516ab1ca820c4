"""Rules of overlap: requirements of each kind of overlap on the rest of the layout."""

from __future__ import annotations

from typing import Any

from megaloom.planner.contract.choices import Overlap
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.workload import Precision, Workload

from .rule import (
    Case,
    Owner,
    Rule,
    Truth,
    Words,
)


def _off(case: Case, overlap: Overlap) -> Truth:
    return case.layout.has_overlap(overlap) == 0


def _weights(case: Case) -> Truth:
    x = case.layout
    return _off(case, Overlap.WEIGHTS) | ((x.distributed_optimizer == 1) & x.has_overlap(Overlap.GRADIENTS))


def _weights_text(case: Case) -> Words:
    if not case.layout.distributed_optimizer:
        message = "`--overlap weights` needs the distributed optimizer, which gathers weights"
        return message, "distributed_optimizer on, or no overlap of weights"
    return "`--overlap weights` needs `--overlap gradients`", "overlap of gradients too"


def _tensor(case: Case) -> Truth:
    return _off(case, Overlap.TENSOR) | (case.layout.sequence_parallel == 1)


def _tensor_text(case: Case) -> Words:
    message = "`--overlap tensor` needs sequence parallelism"
    return message, "sequence_parallel on, or no overlap of tensor"


def within_node(tp: Any, cluster: Cluster) -> Truth:
    """Return True where the tensor-parallel ranks share a node."""
    return (cluster.nodes == 1) | (cluster.per_node % tp == 0)


def _tensor_node(case: Case) -> Truth:
    return _off(case, Overlap.TENSOR) | within_node(case.layout.tp, case.cluster)


def _tensor_node_text(case: Case) -> Words:
    message = f"`--overlap tensor` needs tp within a node of {case.cluster.per_node} devices, got tp {case.layout.tp}"
    return message, "tp that divides a node, or no overlap of tensor"


def _experts(case: Case) -> Truth:
    return _off(case, Overlap.EXPERTS) | (case.layout.ep > 1)


def _experts_text(case: Case) -> Words:
    return "`--overlap experts` needs ep of at least 2, got 1", "ep at least 2, or no overlap of experts"


def _experts_vpp(case: Case) -> Truth:
    return _off(case, Overlap.EXPERTS) | (case.layout.pp == 1) | (case.layout.vpp > 1)


def _experts_vpp_text(case: Case) -> Words:
    message = f"`--overlap experts` with pp {case.layout.pp} needs vpp of at least 2"
    return message, "vpp at least 2, or no overlap of experts"


def _experts_recompute(case: Case) -> Truth:
    return _off(case, Overlap.EXPERTS) | ((case.layout.full_recompute == 0) & (case.layout.recompute_layers == 0))


def _experts_recompute_text(case: Case) -> Words:
    message = "`--overlap experts` cannot be combined with `--recompute full`"
    return message, "recompute none or selective, or no overlap of experts"


def _short(workload: Workload) -> bool:
    return workload.precision is not Precision.FP32


def _experts_precision(case: Case) -> Truth:
    return _off(case, Overlap.EXPERTS) | _short(case.workload)


def _experts_precision_text(case: Case) -> Words:
    return "`--overlap experts` does not work in fp32", "bf16 would, or no overlap of experts"


def _alone(x: Any, ahead: int) -> Truth:
    return (ahead == 0) | ((ahead == 1) & (x.pp > 1))


def _experts_ahead(case: Case) -> Truth:
    return _off(case, Overlap.EXPERTS) | _alone(case.layout, case.requirements.multi_token)


def _experts_ahead_text(case: Case) -> Words:
    ahead, off = case.requirements.multi_token, "no overlap of experts"
    if ahead > 1:
        return f"the exchange of experts overlaps in a model that predicts {ahead} tokens further ahead", off
    return (
        "the exchange of experts overlaps in a model that predicts a token further ahead, and pp is 1",
        f"pp, or {off}",
    )


def may_overlap_experts(x: Any, ahead: int, workload: Workload) -> Truth:
    """Return True where expert overlap is legal, provided that chunks are interleaved and no block is recomputed."""
    return (x.ep > 1) & _short(workload) & _alone(x, ahead)


OVERLAP_RULES = (
    Rule(
        "overlap-weights",
        "`--overlap weights` needs `--distributed-optimizer` and `--overlap gradients`.",
        "distributed_optimizer on and overlap of gradients, or without overlap of weights",
        Owner.CALLERS,
        "Megatron-LM's validate_args",
        _weights,
        _weights_text,
    ),
    Rule(
        "overlap-tensor",
        "`--overlap tensor` needs `--sequence-parallel`.",
        "sequence_parallel on, or no overlap of tensor",
        Owner.CALLERS,
        "Megatron-LM's validate_args",
        _tensor,
        _tensor_text,
    ),
    Rule(
        "overlap-tensor-node",
        "`--overlap tensor` needs all tensor-parallel ranks in one node.",
        "tp that divides a node, or no overlap of tensor",
        Owner.PLANNER,
        "its buffers are in memory that devices read of each other (Transformer Engine, module/base.py: initialize_ub)",
        _tensor_node,
        _tensor_node_text,
    ),
    Rule(
        "overlap-experts",
        "`--overlap experts` needs ep of at least 2.",
        "ep at least 2, or no overlap of experts",
        Owner.CORE,
        "transformer_config.py:1863",
        _experts,
        _experts_text,
    ),
    Rule(
        "overlap-experts-vpp",
        "`--overlap experts` with pp above 1 needs vpp of at least 2.",
        "vpp at least 2, or no overlap of experts",
        Owner.CORE,
        "transformer_config.py:1858",
        _experts_vpp,
        _experts_vpp_text,
    ),
    Rule(
        "overlap-experts-recompute",
        "`--overlap experts` cannot be combined with `--recompute full`.",
        "recompute none or selective, or no overlap of experts",
        Owner.CORE,
        "transformer_config.py:1871 and 1877",
        _experts_recompute,
        _experts_recompute_text,
    ),
    Rule(
        "overlap-experts-precision",
        "`--overlap experts` needs a precision of 16 bits or fewer.",
        "bf16, or no overlap of experts",
        Owner.CORE,
        "transformer_config.py:1882",
        _experts_precision,
        _experts_precision_text,
    ),
    Rule(
        "overlap-experts-ahead",
        "`--overlap experts` allows at most one multi-token prediction block, and needs pp above 1 for it.",
        "pp at least 2, or no overlap of experts",
        Owner.CORE,
        "transformer_config.py:1889 and 1893",
        _experts_ahead,
        _experts_ahead_text,
    ),
)
