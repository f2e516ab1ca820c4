"""Rules of gradients and weights that are sharded over data-parallel ranks, of experts or of other weights."""

from __future__ import annotations

from functools import lru_cache

from megaloom.dsl import Graph
from megaloom.planner.contract.choices import ExpertShard, GradReduce, Overlap, Reshard, Shard
from megaloom.planner.contract.layout import FULLY_SHARDED, Layout
from megaloom.planner.contract.workload import Precision

from .divisors import divisors, nearest
from .rule import (
    Case,
    L,
    Owner,
    Rule,
    Truth,
    Words,
)
from .shared_weights import shared_weight_users

SHARDS = "`--shard gradients` and `--shard weights`"  # and such a value of --expert-shard
NOT_SHOWN = "nobody has shown that the result is right, so it is refused"
PRECISIONS = (Precision.FP32, Precision.BF16, Precision.FP8, Precision.MXFP8)


def _ddp(case: Case[L]) -> Truth:
    holds: Truth = case.layout.fsdp == 0
    return holds


def _flag(x: Layout) -> str:
    return f"`--shard {x.shard}`" if FULLY_SHARDED[x.shard] or not x.fsdp else f"`--expert-shard {x.expert_shard}`"


def _or_less(x: Layout) -> str:
    """Return the options that shard optimizer state alone."""
    return "--shard optimizer" + (f" --expert-shard {ExpertShard.SAME}" if x.expert_shard else "")


def _ranks(case: Case[L]) -> Truth:
    holds: Truth = _ddp(case) | (case.layout.dp * case.layout.cp > 1)
    return holds


def _ranks_text(case: Case[Layout]) -> Words:
    none = "" if case.layout.expert_shard else ", or --shard none"
    return f"{_flag(case.layout)} needs dp x cp of at least 2, got 1", f"use dp 2 or more{none}"


def _reshard(case: Case[L]) -> Truth:
    holds: Truth = (case.layout.reshard == Reshard.MICRO_BATCH) | (case.layout.shard == Shard.WEIGHTS)
    return holds


def _reshard_text(case: Case[Layout]) -> Words:
    x = case.layout
    message = f"`--reshard {x.reshard}` needs `--shard weights`, got `--shard {x.shard}`"
    return message, f"use --shard weights, or --reshard {Reshard.MICRO_BATCH}"


def _replicas(case: Case[L]) -> Truth:
    x = case.layout
    whole = ((x.dp * x.cp) % x.replicas == 0) & ((x.edp % x.replicas == 0) | (not case.requirements.experts))
    holds: Truth = (x.replicas == 1) | (whole & (x.dp * x.cp > x.replicas) & (x.fsdp == 1))
    return holds


def _replicas_text(case: Case[Layout]) -> Words:
    x = case.layout
    if not x.fsdp:
        return f"{x.replicas} replicas need {SHARDS.replace(' and ', ' or ')}, got {_flag(x)}", "use --replicas 1"
    copies = f" and of edp = {x.edp}" if x.edp % x.replicas else ""
    message = f"{x.replicas} replicas are no proper divisor of dp x cp = {x.dp * x.cp}{copies}"
    works = [n for n in divisors(x.dp * x.cp, x.edp) if n < x.dp * x.cp]
    return message, f"use --replicas {nearest(x.replicas, works)}"


def _precision(case: Case[L]) -> Truth:
    holds: Truth = _ddp(case) | (case.workload.precision in PRECISIONS)
    return holds


def _precision_text(case: Case[Layout]) -> Words:
    message = f"{_flag(case.layout)} cannot be combined with --precision {case.workload.precision}"
    return message, f"use --precision bf16, or {_or_less(case.layout)}"


def _grad_reduce(case: Case[L]) -> Truth:
    holds: Truth = _ddp(case) | (case.layout.grad_reduce == GradReduce.FP32)
    return holds


def _grad_reduce_text(case: Case[Layout]) -> Words:
    x = case.layout
    message = f"the runtime does not run {_flag(x)} with `--grad-reduce {x.grad_reduce}`"
    return message, f"use --grad-reduce {GradReduce.FP32}, {_or_less(case.layout)}, or --runtime megatron"


def _experts(case: Case[L]) -> Truth:
    holds: Truth = _ddp(case) | (case.layout.has_overlap(Overlap.EXPERTS) == 0)
    return holds


def _experts_text(case: Case[Layout]) -> Words:
    message = f"{_flag(case.layout)} cannot be combined with `--overlap experts`"
    return message, f"leave experts out of `--overlap`, or use {_or_less(case.layout)}"


def _overlap(case: Case[L]) -> Truth:
    x = case.layout
    holds: Truth = _ddp(case) | ((x.has_overlap(Overlap.GRADIENTS) & x.has_overlap(Overlap.WEIGHTS)) == 1)
    return holds


def _overlap_text(case: Case[Layout]) -> Words:
    message = f"{_flag(case.layout)} always overlaps the gather of weights and the reduction of gradients"
    return message, f"add gradients and weights to `--overlap`, or use {_or_less(case.layout)}"


@lru_cache(maxsize=16)
def _shared_weight(graph: Graph) -> str | None:
    """Return the name of a weight that two chunks of one rank may use; None if there is none.

    Nodes before and after all blocks are on different ranks.
    """
    blocks = [i for i, n in enumerate(graph.nodes) if n.block is not None] or [0]
    for name, nodes in shared_weight_users(graph).items():
        if any(blocks[0] <= graph.index[n.name] <= blocks[-1] for n in nodes):
            return name
    return None


def _shared(case: Case[L]) -> Truth:
    holds: Truth = _ddp(case) | (case.layout.vpp == 1) | (_shared_weight(case.graph) is None)
    return holds


def _shared_text(case: Case[Layout]) -> Words:
    x = case.layout
    message = f"{_flag(x)} with vpp {x.vpp}: chunks of one rank cannot share the weight {_shared_weight(case.graph)!r}"
    return message, f"use vpp 1, or {_or_less(case.layout)}"


@lru_cache(maxsize=16)
def _scalar(graph: Graph) -> str | None:
    """Return the name of a weight without dims; None if there is none."""
    return next((name for name, slot in graph.weights.items() if not slot.dims), None)


def _rows(case: Case[L]) -> Truth:
    holds: Truth = _ddp(case) | (_scalar(case.graph) is None)
    return holds


def _rows_text(case: Case[Layout]) -> Words:
    message = f"{_flag(case.layout)} shards rows, and the weight {_scalar(case.graph)!r} is one number"
    return message, f"give that weight a dim of size 1, or use {_or_less(case.layout)}"


FSDP_RULES = (
    Rule(
        id="fsdp-ranks",
        sentence=f"{SHARDS} need dp x cp of at least 2.",
        fix="use dp 2 or more, or --shard none",
        owner=Owner.PLANNER,
        source="one rank has nothing to share",
        holds=_ranks,
        explain=_ranks_text,
    ),
    Rule(
        id="fsdp-reshard",
        sentence="`--reshard step` needs `--shard weights`.",
        fix="use --shard weights, or --reshard micro-batch",
        owner=Owner.PLANNER,
        source="only sharded weights are gathered for each pass",
        holds=_reshard,
        explain=_reshard_text,
    ),
    Rule(
        id="fsdp-replicas",
        sentence=f"Several replicas need {SHARDS.replace(' and ', ' or ')}; they are a proper divisor of dp x cp, "
        "and of the copies of experts.",
        fix="use --replicas 1, or a proper divisor of dp x cp",
        owner=Owner.PLANNER,
        source="each replica has all of the state, in equal parts",
        holds=_replicas,
        explain=_replicas_text,
    ),
    Rule(
        id="fsdp-precision",
        sentence=f"{SHARDS} need a precision of fp32, bf16, fp8 or mxfp8.",
        fix="use --precision bf16, or --shard optimizer",
        owner=Owner.PLANNER,
        source=f"fp16 and nvfp4: {NOT_SHOWN}",
        holds=_precision,
        explain=_precision_text,
    ),
    Rule(
        id="fsdp-overlap",
        sentence=f"{SHARDS} always overlap gradients and weights.",
        fix="add gradients and weights to `--overlap`, or use --shard optimizer",
        owner=Owner.PLANNER,
        source="torch's fully_shard gathers the next unit while one computes",
        holds=_overlap,
        explain=_overlap_text,
    ),
    Rule(
        id="fsdp-overlap-experts",
        sentence=f"{SHARDS} cannot be combined with `--overlap experts`.",
        fix="leave experts out of `--overlap`, or use --shard optimizer",
        owner=Owner.PLANNER,
        source=f"two micro-batches in one unit: {NOT_SHOWN}",
        holds=_experts,
        explain=_experts_text,
    ),
    Rule(
        id="fsdp-shared",
        sentence=f"With {SHARDS} and interleaving, blocks share no weight with other nodes.",
        fix="use vpp 1, or --shard optimizer",
        owner=Owner.PLANNER,
        source="torch's fully_shard shards the weights of one unit, and a unit belongs to one model chunk",
        holds=_shared,
        explain=_shared_text,
    ),
    Rule(
        id="fsdp-rows",
        sentence=f"With {SHARDS} each weight has a dim.",
        fix="give that weight a dim of size 1, or use --shard optimizer",
        owner=Owner.PLANNER,
        source="torch's fully_shard shards the rows of weights",
        holds=_rows,
        explain=_rows_text,
    ),
)
OWN_GRADIENTS = Rule(
    id="fsdp-grad-reduce",
    sentence=f"With {SHARDS}, the runtime reduces gradients in fp32.",
    fix="use --grad-reduce fp32, or --shard optimizer, or plan for Megatron-LM: --runtime megatron",
    owner=Owner.RUNTIME,
    source=f"gradients in bf16: {NOT_SHOWN}; Megatron-FSDP recommends them (its user guide, --grad-reduce-in-bf16)",
    holds=_grad_reduce,
    explain=_grad_reduce_text,
)
"""A rule of Megaloom's own runtime that a search for its plans keeps, too."""
