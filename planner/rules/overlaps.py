"""The rules of overlap: what an exchange that goes on while devices compute asks of the rest of the layout."""

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
        message = "the gathering of weights overlaps, and without the distributed optimizer there are none to gather"
        return message, "distributed_optimizer on, or no overlap of weights"
    return "the gathering of weights overlaps, and the reduction of gradients does not", "overlap of gradients too"


def _tensor(case: Case) -> Truth:
    return _off(case, Overlap.TENSOR) | (case.layout.sequence_parallel == 1)


def _tensor_text(case: Case) -> Words:
    message = f"tp {case.layout.tp} overlaps with products, and sequences are not divided over it"
    return message, "sequence_parallel on, or no overlap of tensor"


def within_node(tp: Any, cluster: Cluster) -> Truth:
    """Whether the devices of tp share a node."""
    return (cluster.nodes == 1) | (cluster.per_node % tp == 0)


def _tensor_node(case: Case) -> Truth:
    return _off(case, Overlap.TENSOR) | within_node(case.layout.tp, case.cluster)


def _tensor_node_text(case: Case) -> Words:
    message = f"tp {case.layout.tp} overlaps with products, and goes beyond a node of {case.cluster.per_node}"
    return message, "tp that divides a node, or no overlap of tensor"


def _experts(case: Case) -> Truth:
    return _off(case, Overlap.EXPERTS) | (case.layout.ep > 1)


def _experts_text(case: Case) -> Words:
    return "the exchange of experts overlaps, and ep is 1", "ep at least 2, or no overlap of experts"


def _experts_vpp(case: Case) -> Truth:
    return _off(case, Overlap.EXPERTS) | (case.layout.pp == 1) | (case.layout.vpp > 1)


def _experts_vpp_text(case: Case) -> Words:
    message = f"the exchange of experts overlaps under pp {case.layout.pp}, and chunks are not interleaved"
    return message, "vpp at least 2, or no overlap of experts"


def _experts_recompute(case: Case) -> Truth:
    return _off(case, Overlap.EXPERTS) | ((case.layout.full_recompute == 0) & (case.layout.recompute_layers == 0))


def _experts_recompute_text(case: Case) -> Words:
    message = "the exchange of experts overlaps with a way back on which blocks are computed again"
    return message, "recompute none or selective, or no overlap of experts"


def _short(workload: Workload) -> bool:
    return workload.precision is not Precision.FP32


def _experts_precision(case: Case) -> Truth:
    return _off(case, Overlap.EXPERTS) | _short(case.workload)


def _experts_precision_text(case: Case) -> Words:
    return "the exchange of experts overlaps in fp32", "bf16 would, or no overlap of experts"


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
    """Whether experts may overlap under these layouts, if there are chunks and no block is computed again."""
    return (x.ep > 1) & _short(workload) & _alone(x, ahead)


RULES = (
    Rule(
        "overlap-weights",
        "Overlap of weights needs the distributed optimizer, and overlap of gradients.",
        "distributed_optimizer on and overlap of gradients, or without overlap of weights",
        Owner.CALLERS,
        "Megatron-LM's validate_args",
        _weights,
        _weights_text,
    ),
    Rule(
        "overlap-tensor",
        "Overlap of tensor needs sequence parallelism.",
        "sequence_parallel on, or no overlap of tensor",
        Owner.CALLERS,
        "Megatron-LM's validate_args",
        _tensor,
        _tensor_text,
    ),
    Rule(
        "overlap-tensor-node",
        "Overlap of tensor stays within a node.",
        "tp that divides a node, or no overlap of tensor",
        Owner.PLANNER,
        "its buffers are in memory that devices read of each other (Transformer Engine, module/base.py: initialize_ub)",
        _tensor_node,
        _tensor_node_text,
    ),
    Rule(
        "overlap-experts",
        "Overlap of experts needs ep.",
        "ep at least 2, or no overlap of experts",
        Owner.CORE,
        "transformer_config.py:1863",
        _experts,
        _experts_text,
    ),
    Rule(
        "overlap-experts-vpp",
        "Overlap of experts under pp needs vpp.",
        "vpp at least 2, or no overlap of experts",
        Owner.CORE,
        "transformer_config.py:1858",
        _experts_vpp,
        _experts_vpp_text,
    ),
    Rule(
        "overlap-experts-recompute",
        "Overlap of experts does without full recompute.",
        "recompute none or selective, or no overlap of experts",
        Owner.CORE,
        "transformer_config.py:1871 and 1877",
        _experts_recompute,
        _experts_recompute_text,
    ),
    Rule(
        "overlap-experts-precision",
        "Overlap of experts is for 16 bits and fewer.",
        "bf16, or no overlap of experts",
        Owner.CORE,
        "transformer_config.py:1882",
        _experts_precision,
        _experts_precision_text,
    ),
    Rule(
        "overlap-experts-ahead",
        "Overlap of experts in a model that predicts a token further ahead needs pp, and no more of them do.",
        "pp at least 2, or no overlap of experts",
        Owner.CORE,
        "transformer_config.py:1889 and 1893",
        _experts_ahead,
        _experts_ahead_text,
    ),
)
