"""A plan as torchtitan's fields, for its TOML of 0.2.2 and for its Python configuration of 0.3.0.

torchtitan trains models of its own, by name: the plan's model must have the weights of one of them. It also shards in
its own way: with torch's fully_shard, after tensor parallelism. `torchtitan_checks` refuses other plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import frozen

from megaloom.dsl import Graph
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan

from .decoder import read_decoder
from .target import TRAIN_INSTEAD, Target, refuse
from .torchtitan_checks import TORCH_DTYPES, check_torchtitan, reshard_after_forward
from .torchtitan_flavors import Flavor, find_flavor, flavors_of
from .whole_layers import StageLayers, recomputed_layers, stage_layers

RING = "alltoall"  # keys and values go around a ring, a part at a time, as the plan has it
FLOAT8 = "quantize.linear.float8"
"""The section of products in 8 bits, and the name of their converter, in 0.2.2."""
HEADS = {Target.TORCHTITAN: "output", Target.TORCHTITAN_0_3: "lm_head"}
"""The module of the logits, by the release of torchtitan."""


@frozen
class TitanFields:
    """A plan in torchtitan's words: the flavor of its model, and the fields of two sections of the configuration."""

    flavor: Flavor
    training: Mapping[str, object]
    parallelism: Mapping[str, object]


def titan_fields(plan: Plan, graph: Graph, target: Target) -> TitanFields:
    """Return a plan as torchtitan's fields. Raise UserError that names what this release does otherwise."""
    m = read_decoder(graph, target)
    stages, flavor = stage_layers(plan, m, graph, target), find_flavor(m, target)
    if flavor is None:
        known = ", ".join(f"{f.model} {f.name}" for f in flavors_of(target))
        refuse(target, f"{graph.name}: it trains its own models only", f"its models are {known}\n{TRAIN_INSTEAD}")
    check_torchtitan(plan, flavor, target)
    recomputed_layers(plan.layout, m, target)
    parallelism = _parallelism(plan, stages, target)
    return TitanFields(flavor, dict(_training(plan)), dict(parallelism))


def _training(plan: Plan) -> Iterator[tuple[str, object]]:
    """Yield the batch sizes. The local batch of a pipeline has all its micro-batches; else it is one micro-batch."""
    x, w = plan.layout, plan.workload
    yield "local_batch_size", w.batch // x.dp if x.pp > 1 else x.micro_batch
    yield "global_batch_size", w.batch
    yield "seq_len", w.seq
    yield "mixed_precision_param", TORCH_DTYPES[w.precision]


def _parallelism(plan: Plan, stages: tuple[StageLayers, ...], target: Target) -> Iterator[tuple[str, object]]:
    x = plan.layout
    replicas, shards = (x.replicas, x.dp // x.replicas) if x.shard else (x.dp, 1)
    yield "data_parallel_replicate_degree", replicas
    yield "data_parallel_shard_degree", shards
    yield "fsdp_reshard_after_forward", reshard_after_forward(x)
    yield "tensor_parallel_degree", x.tp
    yield from _of_release(x, target)
    yield "pipeline_parallel_degree", x.pp
    if x.pp > 1:
        yield "pipeline_parallel_schedule", "Interleaved1F1B" if x.vpp > 1 else "1F1B"
        yield "pipeline_parallel_microbatch_size", x.micro_batch
        yield "module_fqns_per_model_part", [_modules(stage, HEADS[target]) for stage in stages]


def _of_release(x: Layout, target: Target) -> Iterator[tuple[str, object]]:
    """Yield the degrees that differ between releases. 0.3 has none for tensor parallelism of experts."""
    if target is Target.TORCHTITAN_0_3:
        if x.tp > 1:
            yield "enable_sequence_parallel", x.sequence_parallel
        yield "context_parallel_degree", x.cp
        yield "expert_parallel_degree", x.ep
        return
    yield "context_parallel_degree", x.cp
    if x.cp > 1:
        yield "context_parallel_rotate_method", RING  # its default gathers all keys and values
    yield "expert_parallel_degree", x.ep
    yield "expert_tensor_parallel_degree", x.etp if x.ep > 1 else 1


def _modules(stage: StageLayers, head: str) -> list[str]:
    """Return torchtitan's names of the modules of one stage."""
    layers = [f"layers.{i}" for i in range(stage.first, stage.last)]
    return ["tok_embeddings"] * stage.embedding + layers + ["norm", head] * stage.head
