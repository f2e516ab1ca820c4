"""A plan as the TOML file of torchtitan, whose releases up to 0.2.2 read one.

torchtitan trains models of its own, by name: a plan's model must have the weights of one of them. How it divides them
is its own as well: with the optimizer's state it divides weights and gradients, with tensor parallelism what that
leaves whole. What it would do otherwise than the plan is refused; what costs the same either way is said in the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from megaloom.dsl import Graph
from megaloom.planner.contract.layout import (
    INNER,
    Layout,
    Precision,
    Recompute,
    free,
    switched,
)
from megaloom.planner.contract.plans import Plan

from .decoder import STAYS, cannot, gpt
from .slurm import hosts
from .torchtitan_flavors import FLAVORS, Flavor, find
from .whole_layers import Part, parts, recomputed

NAME = "torchtitan"
COMPUTES = {Precision.BF16: "bfloat16", Precision.FP32: "float32"}


def toml(plan: Plan, graph: Graph) -> str:
    """The file. Raises UserError that names what torchtitan does otherwise."""
    m = gpt(graph, NAME)
    cut, flavor = parts(plan, m, graph, NAME), find(m)
    if flavor is None:
        known = ", ".join(f"{f.model} {f.name}" for f in FLAVORS)
        cannot(NAME, f"{graph.name}: it trains models of its own", f"those are {known}\n{STAYS}")
    _computes(plan)
    recomputed(plan.layout, m, NAME)
    _supports(plan.layout, flavor)
    nodes, each = hosts(plan.cluster)
    tables: dict[str, dict[str, object]] = {
        "model": {"name": flavor.model, "flavor": flavor.name},
        "training": dict(_training(plan)),
        "parallelism": dict(_parallelism(plan.layout, cut)),
        "activation_checkpoint": {"mode": str(plan.layout.recompute)},
    }
    head = f"""# {graph.name} on {plan.cluster}: {plan.layout}
# For torchtitan 0.2.2: torchrun --nnodes {nodes} --nproc-per-node {each} ... -m torchtitan.train --job.config_file THIS
# The model is as torchtitan has it, which costs the same: {flavor.own}.
# Tokenizer (model.hf_assets_path), data, steps and learning rate are yours.
"""
    return head + "".join(f"\n[{name}]\n{_table(values)}" for name, values in tables.items())


def _computes(plan: Plan) -> None:
    """Refuse numbers that torchtitan has not, or has on other layouts only."""
    precision, x = plan.workload.precision, plan.layout
    if precision not in COMPUTES:
        cannot(NAME, f"precision {precision}", f"plan with --precision {' or '.join(COMPUTES)}")
    if precision is Precision.BF16 and x.dp * x.cp == 1 and x.world > 1:
        what = f"bf16 on {x}: it keeps fp32 weights beside those of bf16 only where data or sequences are divided"
        cannot(NAME, what, "plan with dp or cp of 2 or more, or --precision fp32")


def _supports(x: Layout, flavor: Flavor) -> None:
    """Refuse layouts that torchtitan has not."""
    if x.tp > 1 and not x.sequence_parallel:
        cannot(NAME, f"tp {x.tp} without sequence parallelism", "plan with --sequence-parallel")
    if x.recompute is Recompute.SELECTIVE:
        what = "recompute selective: what it keeps then is another choice than all but the core of attention"
        cannot(NAME, what, "plan with --recompute none or full")
    if x.recompute_layers:
        what = f"recompute full of {x.recompute_layers} layers a stage: it does so with all or none"
        cannot(NAME, what, "plan with --recompute full")
    for overlap in (o for o in x.overlaps if o in INNER):
        cannot(
            NAME, f"overlap of {overlap}: what it does of that is another's", "plan with --overlap gradients weights"
        )
    if x.dp * x.cp > 1 and x.overlaps != switched(free(x.distributed_optimizer)):
        said = ", ".join(x.overlaps) or "none"
        cannot(NAME, f"overlap of {said}: gradients and weights always do", "plan without --overlap")
    if x.microbatch_group not in (0, x.pp):
        cannot(NAME, f"micro-batches in groups of {x.microbatch_group}: its groups are of pp {x.pp}")
    if x.dp * x.cp > 1 and not x.distributed_optimizer and x.world > x.dp:
        cannot(NAME, f"whole weights on each of dp {x.dp} beside other axes", "plan with --distributed-optimizer")
    if flavor.decoder.moe and x.etp not in ((1, x.tp) if x.ep > 1 else (x.tp,)):
        cannot(NAME, f"etp {x.etp} with tp {x.tp} and ep {x.ep}", f"plan with --etp {x.tp}")
    if flavor.model == "deepseek_v3" and x.cp > 1:
        cannot(NAME, f"cp {x.cp} of {flavor.model}: its attention there is another kernel", "plan with --cp 1")
    if flavor.model == "qwen3" and x.pp > 1:
        cannot(NAME, f"pp {x.pp} of {flavor.model}: it does not cut that into stages", "plan with --pp 1")


def _training(plan: Plan) -> Iterator[tuple[str, object]]:
    """A pipeline gets all micro-batches of a step at once; without one gradients of micro-batches are added up."""
    x, w = plan.layout, plan.workload
    yield "local_batch_size", w.batch // x.dp if x.pp > 1 else x.micro_batch
    yield "global_batch_size", w.batch
    yield "seq_len", w.seq
    yield "mixed_precision_param", COMPUTES[w.precision]


def _parallelism(x: Layout, cut: tuple[Part, ...]) -> Iterator[tuple[str, object]]:
    divided = x.distributed_optimizer
    yield "data_parallel_replicate_degree", 1 if divided else x.dp
    yield "data_parallel_shard_degree", x.dp if divided else 1
    yield "fsdp_reshard_after_forward", "never"  # what is gathered for a forward stays for its backward
    yield "tensor_parallel_degree", x.tp
    yield "context_parallel_degree", x.cp
    yield "expert_parallel_degree", x.ep
    yield "expert_tensor_parallel_degree", x.etp if x.ep > 1 else 1
    yield "pipeline_parallel_degree", x.pp
    if x.pp > 1:
        yield "pipeline_parallel_schedule", "Interleaved1F1B" if x.vpp > 1 else "1F1B"
        yield "pipeline_parallel_microbatch_size", x.micro_batch
        yield "module_fqns_per_model_part", [_modules(part) for part in cut]


def _modules(part: Part) -> list[str]:
    """The modules of one stage by their names there."""
    layers = [f"layers.{i}" for i in range(part.first, part.last)]
    return ["tok_embeddings"] * part.embedding + layers + ["norm", "output"] * part.head


def _table(values: dict[str, object]) -> str:
    return "".join(f"{key} = {_said(value)}\n" for key, value in values.items())


def _said(value: object) -> str:
    """Strings, numbers and lists are written alike in JSON and in TOML; each stage gets a line."""
    if isinstance(value, list):
        return "[\n" + "".join(f"  {json.dumps(one)},\n" for one in value) + "]"
    return json.dumps(value)
