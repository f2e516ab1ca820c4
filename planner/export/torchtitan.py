"""Write a plan as the TOML file of torchtitan, whose releases up to 0.2.2 read one.

torchtitan trains models of its own, by name: the plan's model must have the weights of one of them. It also shards in
its own way: with torch's fully_shard, after tensor parallelism. A plan that torchtitan would run otherwise is refused;
a small difference is a comment in the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NoReturn

from megaloom.dsl import Graph
from megaloom.dsl.sharding_table import padded_vocabulary
from megaloom.planner.contract.choices import (
    MICROBATCH_OVERLAPS,
    GradReduce,
    Overlap,
    OverlapSet,
    Recompute,
    Reshard,
    Shard,
    default_overlaps,
)
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision

from .decoder import read_decoder
from .quoting import title
from .slurm import machines
from .target import TRAIN_INSTEAD, Target, refuse
from .torchtitan_flavors import FLAVORS, Flavor, find_flavor
from .whole_layers import StageLayers, recomputed_layers, stage_layers

RING = "alltoall"  # keys and values go around a ring, a part at a time, as the plan has it
ACTIVE_CHUNKS = 3  # max_active_stages of torch's pipelining/schedules.py
TORCH_DTYPES = {Precision.BF16: "bfloat16", Precision.FP32: "float32"}


def config_toml(plan: Plan, graph: Graph) -> str:
    """Return a plan as torchtitan's TOML file. Raises UserError that names what torchtitan does otherwise."""
    m = read_decoder(graph, Target.TORCHTITAN)
    stages, flavor = stage_layers(plan, m, graph, Target.TORCHTITAN), find_flavor(m)
    if flavor is None:
        known = ", ".join(f"{f.model} {f.name}" for f in FLAVORS)
        _refuse(f"{graph.name}: it trains its own models only", f"its models are {known}\n{TRAIN_INSTEAD}")
    _check_precision(plan)
    _check_gradients(plan.layout)
    recomputed_layers(plan.layout, m, Target.TORCHTITAN)
    _check_overlaps(plan.layout)
    _check_layout(plan.layout, flavor)
    _check_vocabulary(plan.layout, m.vocab)
    nodes, each = machines(plan.cluster)
    tables: dict[str, dict[str, object]] = {
        "model": {"name": flavor.model, "flavor": flavor.name},
        "training": dict(_training(plan)),
        "parallelism": dict(_parallelism(plan, stages)),
        "activation_checkpoint": {"mode": str(plan.layout.recompute)},
        "compile": {"enable": True, "components": ["model", "loss"]},
    }
    head = f"""{title(plan, graph.name)}\
# For torchtitan 0.2.2: torchrun --nnodes {nodes} --nproc-per-node {each} ... -m torchtitan.train --job.config_file THIS
# torchtitan's own model has {flavor.own}. That does not change the step time.
{_chunks_note(plan.layout)}# Add the tokenizer (model.hf_assets_path), data, steps and learning rate.
"""
    return head + "".join(f"\n[{name}]\n{_table(values)}" for name, values in tables.items())


def _refuse(what: str, instead: str = TRAIN_INSTEAD) -> NoReturn:
    refuse(Target.TORCHTITAN, what, instead)


def _check_precision(plan: Plan) -> None:
    """Refuse a precision that torchtitan does not have, or has on other layouts only."""
    precision, x = plan.workload.precision, plan.layout
    if precision not in TORCH_DTYPES:
        _refuse(f"precision {precision}", f"plan with --precision {' or '.join(TORCH_DTYPES)}")
    if precision is Precision.BF16 and x.dp * x.cp == 1 and x.world > 1:
        _refuse(
            f"bf16 on {x}: it has fp32 weights beside those in bf16 only where dp or cp is above 1",
            "plan with --dp 2 or more, --cp 2 or more, or --precision fp32",
        )


def _check_gradients(x: Layout) -> None:
    """Refuse gradients in bf16: the only value of torchtitan's training.mixed_precision_reduce is float32."""
    if x.grad_reduce is not GradReduce.FP32:
        _refuse(f"{x.grad_reduce} gradients: it reduces gradients in fp32 only", "plan with --grad-reduce fp32")


def _check_overlaps(x: Layout) -> None:
    """Refuse overlap other than that of gradients and weights, which torchtitan always has."""
    for overlap in (o for o in x.overlaps if o in MICROBATCH_OVERLAPS):
        own = {
            Overlap.TENSOR: "it has that only through its async-TP option, which this plan does not use",
            Overlap.EXPERTS: "it overlaps the all-to-all of experts in its own way, which the plan does not predict",
        }[overlap]
        _refuse(f"overlap of {overlap}: {own}", "plan with --overlap gradients weights")
    if x.dp * x.cp > 1 and x.overlaps != OverlapSet(default_overlaps(x.shard)):
        overlaps = ", ".join(x.overlaps) or "none"
        _refuse(f"overlap of {overlaps}: it always overlaps gradients and weights", "plan without --overlap")


def _check_layout(x: Layout, flavor: Flavor) -> None:
    """Refuse a layout that torchtitan does not have."""
    if x.tp > 1 and not x.sequence_parallel:
        _refuse(f"tp {x.tp} without sequence parallelism", "plan with --sequence-parallel")
    if x.recompute is Recompute.SELECTIVE:
        what = "recompute selective: it chooses ops to save, not modules to recompute"
        _refuse(what, "plan with --recompute none or full")
    if x.recompute_layers:
        what = f"recompute full of the first {x.recompute_layers} layers of each stage: it recomputes all or none"
        _refuse(what, "plan with --recompute full")
    if x.microbatch_group not in (0, x.pp):
        _refuse(f"microbatch group {x.microbatch_group}: its groups have pp = {x.pp} micro-batches")
    if x.dp * x.cp > 1 and x.shard is Shard.NONE and x.world > x.dp:
        what = f"dp {x.dp} without a sharded optimizer, together with other axes"
        _refuse(what, "plan with --shard weights")
    if flavor.decoder.moe and x.etp not in ((1, x.tp) if x.ep > 1 else (x.tp,)):
        _refuse(f"etp {x.etp} with tp {x.tp} and ep {x.ep}", f"plan with --etp {x.tp}")
    if flavor.model == "deepseek_v3" and x.cp > 1:
        _refuse(
            f"cp {x.cp} of {flavor.model}: with context parallelism it runs another attention kernel",
            "plan with --cp 1",
        )
    if flavor.model == "qwen3" and x.pp > 1:
        _refuse(f"pp {x.pp} of {flavor.model}: it has no pipeline stages for that model", "plan with --pp 1")


def _check_vocabulary(x: Layout, vocab: int) -> None:
    """Refuse a padded vocabulary. Without a multiple, tp ranks have unequal parts, which cost what the largest does."""
    if x.vocab_multiple > 1 and (padded := padded_vocabulary(vocab, x.split)) != vocab:
        _refuse(f"a vocabulary padded from {vocab:,} to {padded:,}", "plan with --vocab-multiple 1")


def _training(plan: Plan) -> Iterator[tuple[str, object]]:
    """Yield the batch sizes. The local batch of a pipeline has all its micro-batches; else it is one micro-batch."""
    x, w = plan.layout, plan.workload
    yield "local_batch_size", w.batch // x.dp if x.pp > 1 else x.micro_batch
    yield "global_batch_size", w.batch
    yield "seq_len", w.seq
    yield "mixed_precision_param", TORCH_DTYPES[w.precision]


def _reshard_after_forward(x: Layout, microbatches: int) -> str:
    """Return torchtitan's policy for gathered weights. Raise UserError for state that it shards in another way.

    Without a pipeline, fully_shard reduces gradients and frees weights after each backward pass. With "never", that is
    `gradients` if there is one micro-batch, and no value of `shard` if there are more. In a pipeline, weights and
    gradients stay whole until the last micro-batch (torch's pipelining/stage.py: backward_maybe_with_nosync): `weights`
    for a step. With "always", they are freed after forward passes only, which is no value of `shard`.
    """
    if x.dp * x.cp == 1:
        return "never"
    each_microbatch = x.shard is Shard.WEIGHTS and x.reshard is Reshard.MICRO_BATCH
    if x.pp > 1 and (each_microbatch or x.shard is Shard.GRADIENTS):
        what = f"{_named(x)} with pp {x.pp}: in a pipeline it keeps weights and gradients whole for a step"
        _refuse(what, "plan with --shard weights --reshard step")
    if x.pp == 1 and microbatches > 1 and not each_microbatch:
        what = f"{_named(x)} with {microbatches} micro-batches: it reduces gradients after each of them"
        _refuse(what, f"plan with --shard weights, or one micro-batch: --micro-batch {x.micro_batch * microbatches}")
    return "always" if each_microbatch else "never"


def _named(x: Layout) -> str:
    return f"--shard {x.shard}" + (f" --reshard {x.reshard}" if x.reshard else "")


def _chunks_note(x: Layout) -> str:
    """Return a comment on weights that torch's schedule gathers more often than the plan."""
    if x.dp * x.cp == 1 or x.vpp <= ACTIVE_CHUNKS:
        return ""
    return (
        f"# Of {x.vpp} model chunks a rank, torch's schedule holds the weights of {ACTIVE_CHUNKS} at a time, and\n"
        "# gathers those of the others again. The plan does not price that.\n"
    )


def _parallelism(plan: Plan, stages: tuple[StageLayers, ...]) -> Iterator[tuple[str, object]]:
    x = plan.layout
    if x.dp % x.replicas:
        _refuse(
            f"{x.replicas} replicas of dp {x.dp}: each of its replicas has whole cp groups", "plan with --replicas 1"
        )
    replicas, shards = (x.replicas, x.dp // x.replicas) if x.shard else (x.dp, 1)
    yield "data_parallel_replicate_degree", replicas
    yield "data_parallel_shard_degree", shards
    yield "fsdp_reshard_after_forward", _reshard_after_forward(x, x.microbatches(plan.workload.batch))
    yield "tensor_parallel_degree", x.tp
    yield "context_parallel_degree", x.cp
    if x.cp > 1:
        yield "context_parallel_rotate_method", RING  # its default gathers all keys and values
    yield "expert_parallel_degree", x.ep
    yield "expert_tensor_parallel_degree", x.etp if x.ep > 1 else 1
    yield "pipeline_parallel_degree", x.pp
    if x.pp > 1:
        yield "pipeline_parallel_schedule", "Interleaved1F1B" if x.vpp > 1 else "1F1B"
        yield "pipeline_parallel_microbatch_size", x.micro_batch
        yield "module_fqns_per_model_part", [_modules(stage) for stage in stages]


def _modules(stage: StageLayers) -> list[str]:
    """Return torchtitan's names of the modules of one stage."""
    layers = [f"layers.{i}" for i in range(stage.first, stage.last)]
    return ["tok_embeddings"] * stage.embedding + layers + ["norm", "output"] * stage.head


def _table(values: dict[str, object]) -> str:
    return "".join(f"{key} = {_toml(value)}\n" for key, value in values.items())


def _toml(value: object) -> str:
    """Return a value as TOML, which writes strings, numbers and lists as JSON does; each item of a list has a line."""
    if isinstance(value, list):
        return "[\n" + "".join(f"  {json.dumps(one)},\n" for one in value) + "]"
    return json.dumps(value)
