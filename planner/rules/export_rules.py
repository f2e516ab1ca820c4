"""Rules of exports to megatron-core: layouts that it refuses, or for which it computes wrong gradients.

A plan for Megaloom's own runtime may break them, a plan for Megatron-LM may not.
"""

from __future__ import annotations

from bisect import bisect_right

from megaloom.dsl import MLA, Graph, Mamba2
from megaloom.planner.contract.choices import ExpertShard, Reshard
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.model.requirements import ModelRequirements

from .divisors import divisors, nearest
from .rule import (
    Case,
    L,
    Owner,
    Rule,
    Truth,
    Violation,
    Words,
    all_of,
    violated,
)
from .shared_weights import shared_weight_users
from .sizes import divides, nearest_degrees


def _gradients_reduced(case: Case[L]) -> Truth:
    x = case.layout
    holds: Truth = (not case.requirements.experts) | (x.ep > 1) | (x.etp == x.tp)
    return holds


def _gradients_reduced_text(case: Case[Layout]) -> Words:
    x = case.layout
    return f"experts have ep 1 and etp {x.etp}, but tp is {x.tp}", f"use ep 2 or more, or etp {x.tp}"


def _latent(case: Case[L]) -> Truth:
    x = case.layout
    holds: Truth = (x.tp == 1) | (x.sequence_parallel == 1) | (not any(isinstance(n.op, MLA) for n in case.graph.nodes))
    return holds


def _latent_text(case: Case[Layout]) -> Words:
    return (
        f"latent attention has tp {case.layout.tp} without sequence parallelism",
        "add --sequence-parallel, or use tp 1",
    )


def _mamba_chunks(case: Case[L]) -> Truth:
    if not any(isinstance(n.op, Mamba2) for n in case.graph.nodes):
        return True  # then a search need not ask about each number of chunks
    holds: Truth = case.layout.vpp == 1
    return holds


def _mamba_chunks_text(case: Case[Layout]) -> Words:
    return f"a model with Mamba-2 layers has vpp {case.layout.vpp}", "use vpp 1"


def _expert_bias(case: Case[L]) -> Truth:
    holds: Truth = (case.layout.etp == 1) | (not case.requirements.expert_biases)
    return holds


def _expert_bias_text(case: Case[Layout]) -> Words:
    return f"etp {case.layout.etp} shards experts that have biases", "use etp 1"


def _own_width(case: Case[L]) -> Truth:
    sizes = case.requirements.whole_sizes.items()
    return all_of(n % getattr(case.layout, axis) == 0 for (axis, _), found in sizes for n in found)


def _own_width_text(case: Case[Layout]) -> Words:
    sizes = ((axis, dim, n) for (axis, dim), found in case.requirements.whole_sizes.items() for n in found)
    axis, dim, n = next((axis, dim, n) for axis, dim, n in sizes if n % getattr(case.layout, axis))
    degree = getattr(case.layout, axis)
    works = [m for m in divisors(n) if case.cluster.count % m == 0]
    return f"{axis} {degree} does not divide {dim}={n}", f"use {axis} {nearest(degree, works)}"


def _repeated_weight(case: Case[L]) -> str:
    """Return the name of a weight that two chunks of one pipeline rank use; empty if there is none."""
    if not case.starts:
        return ""
    for name, nodes in shared_weight_users(case.graph).items():
        stages = {bisect_right(case.starts, case.graph.index[n.name]) - 1 for n in nodes}
        if len({stage % case.layout.pp for stage in stages}) < len(stages):
            return name
    return ""


def _expert_precision(case: Case[L]) -> Truth:
    holds: Truth = (case.layout.ep == 1) | (case.workload.precision is not Precision.FP16)
    return holds


def _expert_precision_text(case: Case[Layout]) -> Words:
    return f"ep {case.layout.ep} shards experts, which fp16 does not allow", "use bf16, or ep 1"


def _kv_channels(case: Case[L]) -> Truth:
    tp, shapes = case.layout.tp, case.requirements.kv_heads
    return all_of((n % tp == 0) | (2 * n * channels % tp == 0) for n, channels in shapes)


def _kv_channels_text(case: Case[Layout]) -> Words:
    tp = case.layout.tp
    n, c = next((n, c) for n, c in case.requirements.kv_heads if n % tp and 2 * n * c % tp)
    message = f"tp {tp} does not divide the 2 x {n} x {c} = {2 * n * c} channels of keys and values"
    return message, f"use tp {nearest_degrees(case, tp, divisors(2 * n * c))}"


def _inner(requirements: ModelRequirements) -> list[tuple[str, int]]:
    return requirements.sizes("etp")


def _unshared(case: Case[L]) -> Truth:
    return not _repeated_weight(case)


def _unshared_text(case: Case[Layout]) -> Words:
    x = case.layout
    return (
        f"with pp {x.pp} and vpp {x.vpp}, two chunks of one rank use the weight {_repeated_weight(case)!r}",
        "plan with another pp or vpp",
    )


def _megatron_fsdp(case: Case[L]) -> Truth:
    x = case.layout
    plain: Truth = (x.reshard == Reshard.MICRO_BATCH) & (x.expert_shard == ExpertShard.SAME)
    once: Truth = (x.pp == 1) & plain & (case.workload.precision in MEGATRON_FSDP_PRECISIONS)
    holds: Truth = (x.fsdp == 0) | once
    return holds


def _megatron_fsdp_text(case: Case[Layout]) -> Words:
    x, precision = case.layout, case.workload.precision
    if x.expert_shard:
        found, fix = f"beside --expert-shard {x.expert_shard}: {ONE_STRATEGY}", f"use --expert-shard {ExpertShard.SAME}"
    elif x.pp > 1:
        found, fix = f"with pp {x.pp}: the device mesh of Megatron-FSDP has no pipeline stages", "use --pp 1"
    elif x.reshard:
        found, fix = (
            f"--reshard {x.reshard}: Megatron-FSDP frees gathered weights after each pass",
            "use --reshard micro-batch",
        )
    else:
        found, fix = f"in {precision}: {OTHER_FORMATS[precision]}", "use --precision bf16"
    instead = "" if x.expert_shard else ", or --shard optimizer"
    return f"--shard {x.shard} {found}", f"{fix}{instead}"


MEGATRON_FSDP_PRECISIONS = (Precision.BF16, Precision.FP8, Precision.MXFP8)
_NOT_SHOWN = "nobody has shown that Megatron-FSDP trains in it"
OTHER_FORMATS = {
    Precision.FP32: "Megatron-FSDP keeps a second copy of the weights",
    Precision.FP16: _NOT_SHOWN,
    Precision.NVFP4: _NOT_SHOWN,
}
ONE_STRATEGY = "Megatron-FSDP has one --data-parallel-sharding-strategy for all weights"
MEGATRON_FSDP = Rule(
    id="megatron-fsdp",
    sentence="With `--shard gradients` and `--shard weights`, pp is 1, the precision bf16, fp8 or mxfp8, weights are "
    "freed after each pass, and experts are sharded as all other weights.",
    fix="use pp 1 and --precision bf16, or --shard optimizer",
    owner=Owner.PLANNER,
    source="Megatron-FSDP ends in an error: mcore_fsdp_adapter.py, _get_dp_tp_mesh divides all ranks by dp x cp x tp",
    holds=_megatron_fsdp,
    explain=_megatron_fsdp_text,
)
EXPORT_RULES = (
    MEGATRON_FSDP,
    Rule(
        id="experts-reduced",
        sentence="etp equals tp if a model has experts and ep is 1.",
        fix="use ep 2 or more, or etp equal to tp",
        owner=Owner.EXPORTS,
        source="layers.py:829: unless ep > 1, gradients of experts are summed over dp and cp, not over their replicas",
        holds=_gradients_reduced,
        explain=_gradients_reduced_text,
    ),
    Rule(
        id="expert-bias",
        sentence="etp is 1 if experts have biases.",
        fix="use etp 1, and ep instead",
        owner=Owner.CORE,
        source="transformer_config.py:1589",
        holds=_expert_bias,
        explain=_expert_bias_text,
    ),
    Rule(
        id="own-width",
        sentence="tp and etp divide the dims that user-defined layers shard over them.",
        fix="use tp and etp that divide these dims",
        owner=Owner.CORE,
        source="layers.py:842 and 1166",
        holds=_own_width,
        explain=_own_width_text,
    ),
    Rule(
        id="ep-fp16",
        sentence="ep is 1 in fp16.",
        fix="use bf16, or ep 1",
        owner=Owner.CALLERS,
        source="Megatron-LM's validate_args",
        holds=_expert_precision,
        explain=_expert_precision_text,
    ),
    Rule(
        id="tp-keys",
        sentence="tp divides the channels of all keys and values, 2 x kv_heads x head_dim, where it exceeds kv_heads.",
        fix="use tp that divides them",
        owner=Owner.CORE,
        source="layers.py:842",
        holds=_kv_channels,
        explain=_kv_channels_text,
    ),
    divides("etp-width", "etp divides the inner width of each expert.", "etp", "layers.py:842 and 1166", _inner),
    Rule(
        id="latent-sp",
        sentence="Latent attention with tp above 1 needs sequence parallelism.",
        fix="add --sequence-parallel, or use tp 1",
        owner=Owner.EXPORTS,
        source="multi_latent_attention.py:616: the gradient of the keys that all heads share is not summed over tp",
        holds=_latent,
        explain=_latent_text,
    ),
    Rule(
        id="mamba-chunks",
        sentence="vpp is 1 in a model with Mamba-2 layers.",
        fix="use vpp 1",
        owner=Owner.CORE,
        source="mamba_block.py:173: its Mamba models have no interleaved schedule",
        holds=_mamba_chunks,
        explain=_mamba_chunks_text,
    ),
    Rule(
        id="shared-chunks",
        sentence="No two chunks of a pipeline rank share a weight, such as the embedding and a multi-token prediction "
        "block.",
        fix="use a pp or vpp that puts the output layer and multi-token prediction in one stage",
        owner=Owner.EXPORTS,
        source="finalize_model_grads.py:233: only one chunk's embedding gradient is summed with those of other ranks",
        holds=_unshared,
        explain=_unshared_text,
    ),
)


def export_violations(
    layout: Layout, graph: Graph, workload: Workload, cluster: Cluster, starts: tuple[int, ...] = ()
) -> tuple[Violation, ...]:
    """Return the export rules that a layout breaks; `starts` are the first nodes of its stages."""
    return violated(EXPORT_RULES, Case(layout, graph, workload, cluster, starts))
