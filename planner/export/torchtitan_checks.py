"""Checks of what torchtitan does otherwise than a plan: precision, overlaps, layouts and sharded state, by its release.

Sources: torchtitan 0.2.2 and 0.3.0, distributed/parallel_dims.py, distributed/fsdp.py, models/*/parallelize.py,
components/quantization/float8.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from megaloom.dsl import MLA
from megaloom.dsl.sharding_table import padded_vocabulary
from megaloom.planner.contract.choices import (
    MICROBATCH_OVERLAPS,
    ExpertShard,
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
from megaloom.planner.contract.workload import Precision, Runtime

from .megatron_fsdp import gathers_8_bits
from .target import Inexpressible, Target, refuse_all
from .torchtitan_flavors import Flavor

TORCH_DTYPES = {Precision.BF16: "bfloat16", Precision.FP32: "float32", Precision.FP8: "bfloat16"}


def check_torchtitan(plan: Plan, flavor: Flavor, target: Target) -> None:
    """Raise UserError that names all that a release of torchtitan does otherwise than the plan, and what would work."""
    refuse_all(target, _inexpressible(plan, flavor, target))


def _inexpressible(plan: Plan, flavor: Flavor, target: Target) -> Iterator[Inexpressible]:
    x = plan.layout
    yield from _check_precision(plan, target)
    if plan.workload.precision is Precision.FP8:
        yield from _check_float8(plan, flavor, target)
    yield from _check_overlaps(x)
    yield from _check_layout(x, flavor)
    yield from _check_newer(x, flavor) if target is Target.TORCHTITAN_0_3 else _check_older(x, flavor)
    yield from _check_vocabulary(x, flavor.decoder.vocab)
    yield from _check_state(x, x.microbatches(plan.workload.batch))


def _check_precision(plan: Plan, target: Target) -> Iterator[Inexpressible]:
    """Yield a precision that torchtitan does not have, or has on other layouts only, and gradients in bf16.

    The only value of `training.mixed_precision_reduce` is float32.
    """
    precision, x = plan.workload.precision, plan.layout
    if precision not in TORCH_DTYPES:
        yield Inexpressible(f"precision {precision}", f"plan with --precision {' or '.join(TORCH_DTYPES)}")
    if target is Target.TORCHTITAN and precision.wide is Precision.BF16 and x.dp * x.cp == 1 and x.world > 1:
        what = f"{precision} on {x}: it has fp32 weights beside those in bf16 only where dp or cp is above 1"
        yield Inexpressible(what, "plan with --dp 2 or more, --cp 2 or more, or --precision fp32")
    if x.grad_reduce is not GradReduce.FP32:
        what = f"{x.grad_reduce} gradients: it reduces gradients in fp32 only"
        yield Inexpressible(what, "plan with --grad-reduce fp32")


def _check_float8(plan: Plan, flavor: Flavor, target: Target) -> Iterator[Inexpressible]:
    """Yield products in 8 bits that torchtitan has as a prototype only, and weights that 0.3 gathers in bf16."""
    if flavor.decoder.moe:
        what = f"precision fp8 of {flavor.model} {flavor.name}: its products of experts in 8 bits are a prototype"
        yield Inexpressible(what, "plan with --precision bf16")
    if target is Target.TORCHTITAN_0_3 and gathers_float8(plan):
        what = "weights that are gathered in 8 bits: this release gathers them in bf16"
        yield Inexpressible(what, "plan without --runtime megatron, or export --to torchtitan")


def gathers_float8(plan: Plan) -> bool:
    """Return whether a plan gathers sharded weights in 8 bits, as those for Megatron-core do."""
    return plan.runtime is Runtime.MEGATRON and gathers_8_bits(plan)


def _check_overlaps(x: Layout) -> Iterator[Inexpressible]:
    """Yield overlap other than that of gradients and weights, which torchtitan always has."""
    for overlap in (o for o in x.overlaps if o in MICROBATCH_OVERLAPS):
        own = {
            Overlap.TENSOR: "it has that only through its async-TP option, which this plan does not use",
            Overlap.EXPERTS: "it overlaps the all-to-all of experts in its own way, which the plan does not predict",
        }[overlap]
        yield Inexpressible(f"overlap of {overlap}: {own}", "plan with --overlap gradients weights")
    of_step = [o for o in x.overlaps if o not in MICROBATCH_OVERLAPS]
    if x.dp * x.cp > 1 and of_step != [*OverlapSet(default_overlaps(x.shard))]:
        overlaps = ", ".join(of_step) or "none"
        what = f"overlap of {overlaps}: it always overlaps gradients and weights"
        yield Inexpressible(what, "plan without --overlap")


def _check_layout(x: Layout, flavor: Flavor) -> Iterator[Inexpressible]:
    """Yield what no release of torchtitan has."""
    if x.recompute is Recompute.SELECTIVE:
        what = "recompute selective: it chooses ops to save, not modules to recompute"
        yield Inexpressible(what, "plan with --recompute none, or --recompute full --recompute-layers 0")
    if x.recompute_layers:
        what = f"recompute full of the first {x.recompute_layers} layers of each stage: it recomputes all or none"
        yield Inexpressible(what, "plan with --recompute full --recompute-layers 0")
    if x.microbatch_group not in (0, x.pp):
        what = f"microbatch group {x.microbatch_group}: its groups have pp = {x.pp} micro-batches"
        yield Inexpressible(what, "plan with --microbatch-group 0")
    if x.dp * x.cp > 1 and x.shard is Shard.NONE and x.world > x.dp:
        what = f"dp {x.dp} without a sharded optimizer, together with other axes"
        yield Inexpressible(what, "plan with --shard weights")
    if x.dp % x.replicas:
        what = f"{x.replicas} replicas of dp {x.dp}: each of its replicas has whole cp groups"
        yield Inexpressible(what, "plan with --replicas 1")
    if x.expert_shard:
        what = f"--expert-shard {x.expert_shard}: it has one policy of gathered weights for all weights"
        yield Inexpressible(what, f"plan with --expert-shard {ExpertShard.SAME}")
    if flavor.decoder.moe and x.ep == 1 and x.etp != x.tp:
        yield Inexpressible(f"etp {x.etp} with tp {x.tp} and ep 1", f"plan with --etp {x.tp}")


def _check_older(x: Layout, flavor: Flavor) -> Iterator[Inexpressible]:
    """Yield what 0.2.2 does not have."""
    if x.tp > 1 and not x.sequence_parallel:
        yield Inexpressible(f"tp {x.tp} without sequence parallelism", "plan with --sequence-parallel")
    if flavor.decoder.moe and x.ep > 1 and x.etp not in (1, x.tp):
        yield Inexpressible(f"etp {x.etp} with tp {x.tp} and ep {x.ep}", f"plan with --etp {x.tp}")
    if flavor.model == "deepseek_v3" and x.cp > 1:
        what = f"cp {x.cp} of {flavor.model}: with context parallelism it runs another attention kernel"
        yield Inexpressible(what, "plan with --cp 1")
    if flavor.model == "qwen3" and x.pp > 1:
        yield Inexpressible(
            f"pp {x.pp} of {flavor.model}: it has no pipeline stages for that model", "plan with --pp 1"
        )


def _check_newer(x: Layout, flavor: Flavor) -> Iterator[Inexpressible]:
    """Yield what 0.3.0 does not have."""
    moe = flavor.decoder.moe
    if x.cp > 1:
        what = f"cp {x.cp}: it gathers all keys and values, which the plan passes around a ring"
        yield Inexpressible(what, "plan with --cp 1, or export --to torchtitan")
    attention = flavor.decoder.attention
    heads = (attention.heads if isinstance(attention, MLA) else attention.kv_heads) or attention.heads
    if heads % x.tp:
        what = f"tp {x.tp} of {flavor.model} {flavor.name}: it divides {heads} heads of keys and values evenly"
        yield Inexpressible(what, f"plan with a --tp that divides {heads}")
    if moe and x.tp > 1 and not x.sequence_parallel:
        yield Inexpressible(f"tp {x.tp} without sequence parallelism", "plan with --sequence-parallel")
    if moe and x.ep > 1 and x.etp > 1:
        what = f"etp {x.etp} with ep {x.ep}: it divides experts by expert parallelism or by tensor parallelism"
        yield Inexpressible(what, "plan with --etp 1")
    if x.ep > 1 and (x.dp // x.replicas * x.tp) % x.ep:
        what = f"ep {x.ep} of {x.replicas} replicas: its experts are divided within a replica"
        yield Inexpressible(what, "plan with --replicas 1")
    if flavor.decoder.tied and x.pp > 1:
        what = f"pp {x.pp} of {flavor.model} {flavor.name}: it has no pipeline of a model with tied embeddings"
        yield Inexpressible(what, "plan with --pp 1")


def _check_vocabulary(x: Layout, vocab: int) -> Iterator[Inexpressible]:
    """Yield a padded vocabulary. Without a multiple, tp ranks have unequal parts, which cost what the largest does."""
    if x.vocab_multiple > 1 and (padded := padded_vocabulary(vocab, x.split)) != vocab:
        yield Inexpressible(f"a vocabulary padded from {vocab:,} to {padded:,}", "plan with --vocab-multiple 1")


def _check_state(x: Layout, microbatches: int) -> Iterator[Inexpressible]:
    """Yield state that torchtitan shards in another way: see `reshard_after_forward`."""
    if x.dp * x.cp == 1:
        return
    if x.pp > 1 and (_each_microbatch(x) or x.shard is Shard.GRADIENTS):
        what = f"{_named(x)} with pp {x.pp}: in a pipeline it keeps weights and gradients whole for a step"
        yield Inexpressible(what, "plan with --shard weights --reshard step")
    if x.pp == 1 and microbatches > 1 and not _each_microbatch(x):
        what = f"{_named(x)} with {microbatches} micro-batches: it reduces gradients after each of them"
        one = f"plan with --shard weights, or one micro-batch: --micro-batch {x.micro_batch * microbatches}"
        yield Inexpressible(what, one)


def reshard_after_forward(x: Layout) -> str:
    """Return torchtitan's policy for gathered weights of a layout that it has.

    Without a pipeline, fully_shard reduces gradients and frees weights after each backward pass. With "never", that is
    `gradients` if there is one micro-batch, and no value of `shard` if there are more. In a pipeline, weights and
    gradients stay whole until the last micro-batch (torch's pipelining/stage.py: backward_maybe_with_nosync): `weights`
    for a step. With "always", they are freed after forward passes only, which is no value of `shard`.
    """
    return "always" if x.dp * x.cp > 1 and _each_microbatch(x) else "never"


def _each_microbatch(x: Layout) -> bool:
    """Return whether weights are gathered for each micro-batch."""
    return x.shard is Shard.WEIGHTS and x.reshard is Reshard.MICRO_BATCH


def _named(x: Layout) -> str:
    return f"--shard {x.shard}" + (f" --reshard {x.reshard}" if x.reshard else "")
