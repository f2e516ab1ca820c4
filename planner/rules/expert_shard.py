"""Rules of `--expert-shard`: which values experts may have beside that of all other weights."""

from __future__ import annotations

from functools import lru_cache

from megaloom.dsl import Graph
from megaloom.planner.contract.choices import ExpertShard, Reshard, Shard
from megaloom.planner.contract.layout import Layout

from .rule import (
    Case,
    L,
    Owner,
    Rule,
    Truth,
    Words,
)

SAME = f"use --expert-shard {ExpertShard.SAME}"


def _same(case: Case[L]) -> Truth:
    """Return whether experts have no value of their own."""
    holds: Truth = case.layout.expert_shard == ExpertShard.SAME
    return holds


def _flag(x: Layout) -> str:
    return f"`--expert-shard {x.expert_shard}`"


def _copies(case: Case[L]) -> Truth:
    x = case.layout
    holds: Truth = _same(case) | ((x.in_replica(x.edp) > 1) & case.requirements.experts)
    return holds


def _copies_text(case: Case[Layout]) -> Words:
    x = case.layout
    if not case.requirements.experts:
        return f"{_flag(x)} needs experts, and the model has none", SAME
    replicas = f" with {x.replicas} replicas" if x.replicas > 1 else ""
    message = f"{_flag(x)} needs several copies of each expert, got edp {x.edp}{replicas}"
    return message, f"use a smaller ep or etp, or --expert-shard {ExpertShard.SAME}"


def _unsharded(case: Case[L]) -> Truth:
    x = case.layout
    some: Truth = (x.shard != Shard.NONE) & (x.expert_shard != ExpertShard.NONE)
    holds: Truth = _same(case) | (some & (x.fsdp == 1))
    return holds


def _unsharded_text(case: Case[Layout]) -> Words:
    x = case.layout
    values = f"`--shard {x.shard}` cannot be combined with {_flag(x)}"
    return f"{values}: no wrapper of weights runs both", f"{SAME}, or optimizer beside gradients or weights"


def _step(case: Case[L]) -> Truth:
    holds: Truth = _same(case) | (case.layout.reshard == Reshard.MICRO_BATCH)
    return holds


def _step_text(case: Case[Layout]) -> Words:
    x = case.layout
    message = f"`--reshard {x.reshard}` cannot be combined with {_flag(x)}"
    return message, f"use --reshard {Reshard.MICRO_BATCH}, and optimizer for what stays gathered for a step"


@lru_cache(maxsize=16)
def _frozen_weight(graph: Graph) -> str | None:
    """Return the name of a weight that is not trained; None if there is none."""
    return next((name for name, slot in graph.weights.items() if not slot.trained), None)


def _trained(case: Case[L]) -> Truth:
    return _same(case) | (_frozen_weight(case.graph) is None)


def _trained_text(case: Case[Layout]) -> Words:
    return f"{_flag(case.layout)} needs trained weights, and {_frozen_weight(case.graph)!r} is frozen", SAME


EXPERT_SHARD_RULES = (
    Rule(
        id="expert-shard-copies",
        sentence="A value of `--expert-shard` other than that of `--shard` needs experts, and edp of at least 2 within "
        "a replica.",
        fix="use a smaller ep or etp, or --expert-shard same",
        owner=Owner.PLANNER,
        source="what one device holds alone is not shared",
        holds=_copies,
        explain=_copies_text,
    ),
    Rule(
        id="expert-shard-unsharded",
        sentence="With different values, one of `--shard` and `--expert-shard` is gradients or weights, and the other "
        "is at least optimizer.",
        fix="use --expert-shard same, or optimizer beside gradients or weights",
        owner=Owner.PLANNER,
        source="megatron-core's DistributedDataParallelConfig has one use_distributed_optimizer for all weights, and "
        "torch's fully_shard shards the state of all weights",
        holds=_unsharded,
        explain=_unsharded_text,
    ),
    Rule(
        id="expert-shard-step",
        sentence="With different values, gathered weights are freed after each pass.",
        fix="use --reshard micro-batch, and optimizer for what stays gathered for a step",
        owner=Owner.PLANNER,
        source="weights that stay gathered for a step are placed as those of optimizer, so each choice has one name",
        holds=_step,
        explain=_step_text,
    ),
    Rule(
        id="expert-shard-frozen",
        sentence="With different values, all weights are trained.",
        fix="use --expert-shard same",
        owner=Owner.PLANNER,
        source="prices count the frozen weights of experts with the dense ones",
        holds=_trained,
        explain=_trained_text,
    ),
)
