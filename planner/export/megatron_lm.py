"""Write a plan as the options of Megatron-LM's pretrain_gpt.py, release core_v0.16.1.

`megatron_options` returns the model, layout and step as Megatron-LM's own options; `script` is the shell script that
starts a training with them, `slurm_script` a job for sbatch. All raise UserError for what has no option.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from attrs import frozen

from megaloom.dsl import Graph, LayerNorm, RMSNorm
from megaloom.dsl.ops.weight import INITIAL_STD
from megaloom.dsl.show.formatting import declared
from megaloom.planner.contract.choices import MICROBATCH_OVERLAPS, GradReduce, Module, Overlap, Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision
from megaloom.planner.rules.export_rules import export_violations

from .decoder import DecoderModel, read_decoder
from .megatron_fsdp import connections, fsdp_options
from .megatron_lm_layers import attention_options, expert_options, feed_forward_options
from .option import Option, option
from .quoting import title
from .slurm import MASTER_ADDR, SRUN, machines, sbatch_header
from .target import Target, refuse
from .whole_layers import StageLayers, equal_layers, pipeline_layout, recomputed_layers, stage_layers

RELEASE = "core_v0.16.1"
TRIAL_STEPS = 20  # of the trial on mock data


@frozen
class MegatronOptions:
    """The options of one plan, in three groups: the model, its layout, and one training step."""

    model: tuple[Option, ...]
    layout: tuple[Option, ...]
    step: tuple[Option, ...]


def megatron_options(plan: Plan, graph: Graph, target: Target = Target.MEGATRON_LM) -> MegatronOptions:
    """Return the options of Megatron-LM that run a plan. Raises UserError that names what no option expresses."""
    model = read_decoder(graph, target)
    starts = tuple(stage.start for stage in plan.stages)
    for violation in export_violations(plan.layout, graph, plan.workload, plan.cluster, starts):
        refuse(target, f"{violation.message}: it computes wrong gradients [{violation.rule}]", violation.fix)
    stages = stage_layers(plan, model, graph, target)
    return MegatronOptions(
        model=tuple(model_options(model, plan.workload.seq, plan.layout.vocab_multiple, target)),
        layout=(
            *_mesh(plan.layout, model),
            *_stages(plan.layout, stages),
            *_memory_and_overlap(plan.layout, model, target),
            *fsdp_options(plan, model, target),
        ),
        step=tuple(_step(plan, model, target)),
    )


def model_options(m: DecoderModel, seq: int, vocab_multiple: int, target: Target) -> Iterator[Option]:
    """Yield the options of a model. seq: tokens per sequence. vocab_multiple: what the vocabulary is padded to."""
    yield option("num-layers", len(m.layers))
    yield option("hidden-size", m.embed)
    if m.mtp:
        yield option("mtp-num-layers", m.mtp)
    yield from attention_options(m, target)
    yield from feed_forward_options(m, target)
    yield from expert_options(m, target)
    yield from _norm(m, target)
    yield option("attention-dropout", getattr(m.attention, "dropout", 0.0))
    yield option("hidden-dropout", m.dropout)
    if m.std != INITIAL_STD:  # its default, too
        yield option("init-method-std", m.std)
    yield option("seq-length", seq)
    yield option("max-position-embeddings", m.positions or seq)
    yield option("make-vocab-size-divisible-by", vocab_multiple)
    if not m.tied:
        yield option("untie-embeddings-and-output-weights")


def _norm(m: DecoderModel, target: Target) -> Iterator[Option]:
    if isinstance(m.norm, LayerNorm) and not m.norm.bias:
        refuse(target, f"{declared(m.norm)}: its LayerNorm always has a bias")
    yield option("normalization", "RMSNorm" if isinstance(m.norm, RMSNorm) else "LayerNorm")
    yield option("norm-epsilon", m.norm.eps)
    if m.norm.plus_one:
        yield option("apply-layernorm-1p")


def _mesh(x: Layout, m: DecoderModel) -> Iterator[Option]:
    yield option("tensor-model-parallel-size", x.tp)
    if x.sequence_parallel:
        yield option("sequence-parallel")
    yield option("pipeline-model-parallel-size", x.pp)
    yield option("context-parallel-size", x.cp)
    if m.moe:
        yield option("expert-model-parallel-size", x.ep)
        yield option("expert-tensor-parallel-size", x.etp)


def _stages(x: Layout, stages: tuple[StageLayers, ...]) -> Iterator[Option]:
    """Yield the options that divide layers over stages; none where Megatron-LM's default is the plan's division."""
    if x.pp == 1:
        return
    each = equal_layers(stages)
    if each is None:
        yield option("pipeline-model-parallel-layout", pipeline_layout(stages))
    elif x.vpp > 1:
        yield option("num-layers-per-virtual-pipeline-stage", each)
    if x.microbatch_group:
        yield option("microbatch-group-size-per-virtual-pipeline-stage", x.microbatch_group)


def _memory_and_overlap(x: Layout, m: DecoderModel, target: Target) -> Iterator[Option]:
    blocks = recomputed_layers(x, m, target)
    if blocks != 0:
        yield option("recompute-granularity", "full")
        yield option("recompute-method", "block" if blocks else "uniform")  # the first layers, or all one by one
        yield option("recompute-num-layers", blocks or 1)
    elif x.recompute is Recompute.SELECTIVE:
        yield option("recompute-granularity", "selective")
        yield option("recompute-modules", *x.recomputed_modules)
    if x.shard:
        yield option("use-distributed-optimizer")
    if x.dp * x.cp > 1:  # else no gradients are reduced and no weights gathered
        yield from (option(OVERLAP_OPTIONS[o]) for o in x.overlaps if o not in MICROBATCH_OVERLAPS)
    yield from (option(OVERLAP_OPTIONS[o]) for o in x.overlaps if o in MICROBATCH_OVERLAPS)


OVERLAP_OPTIONS = {
    Overlap.GRADIENTS: "overlap-grad-reduce",
    Overlap.WEIGHTS: "overlap-param-gather",
    Overlap.TENSOR: "tp-comm-overlap",
    Overlap.EXPERTS: "overlap-moe-expert-parallel-comm",
}
GRADIENTS_IN_BF16 = "grad-reduce-in-bf16"
PRECISION_OPTIONS = {
    Precision.FP32: (),
    # bf16 reduces gradients in fp32 unless GRADIENTS_IN_BF16 is given, fp16 only with the option.
    Precision.BF16: (option("bf16"),),
    Precision.FP16: (option("fp16"), option("accumulate-allreduce-grads-in-fp32")),
    Precision.FP8: (option("bf16"), option("fp8-format", "hybrid"), option("fp8-recipe", "tensorwise")),
    Precision.MXFP8: (option("bf16"), option("fp8-format", "e4m3"), option("fp8-recipe", "mxfp8")),
    Precision.NVFP4: (option("bf16"), option("fp4-format", "e2m1"), option("fp4-recipe", "nvfp4")),
}


def _step(plan: Plan, m: DecoderModel, target: Target) -> Iterator[Option]:
    precision = plan.workload.precision
    yield option("micro-batch-size", plan.layout.micro_batch)
    yield option("global-batch-size", plan.workload.batch)
    yield from PRECISION_OPTIONS[precision]
    if plan.layout.grad_reduce is GradReduce.BF16:
        yield option(GRADIENTS_IN_BF16)
    if m.moe and precision.wide is Precision.BF16:
        yield option("moe-grouped-gemm")  # one kernel for all experts: Megatron-LM has it for bf16 only
    elif Module.MOE_ACT in plan.layout.recomputed_modules:
        refuse(target, f"recompute of moe_act in {precision}", "plan with --precision bf16, or other modules")


def slurm_script(plan: Plan, graph: Graph) -> str:
    """Return the script for sbatch that starts Megatron-LM on every machine of the cluster."""
    return _script(plan, graph, sbatch_header(plan.cluster, graph.name))


def script(plan: Plan, graph: Graph) -> str:
    """Return the shell script that starts Megatron-LM; it is run on every machine of the cluster."""
    return _script(plan, graph, "")


def _script(plan: Plan, graph: Graph, sbatch: str) -> str:
    options, (nodes, each) = megatron_options(plan, graph), machines(plan.cluster)
    model = read_decoder(graph, Target.MEGATRON_LM)
    return f"""#!/usr/bin/env bash
{sbatch}{title(plan, graph.name)}# For pretrain_gpt.py of Megatron-LM {RELEASE}. Set MEGATRON to its folder.
{_notes(model, nodes, bool(sbatch))}set -euo pipefail
{MASTER_ADDR if sbatch else ""}{connections(plan.layout)}
MODEL=(
{_lines(options.model)})
LAYOUT=(
{_lines(options.layout)})
STEP=(
{_lines((*options.step, *REPORTS))})
TRAINING=(
{_lines(trial_options(model))})
if (( $# )); then TRAINING=("$@"); fi

{f"{SRUN} " if sbatch else ""}torchrun --nnodes {nodes} --nproc-per-node {each} \\
  --rdzv-backend c10d --rdzv-id "${{SLURM_JOB_ID:-megaloom}}" \\
  --rdzv-endpoint "${{MASTER_ADDR:-localhost}}:${{MASTER_PORT:-29500}}" \\
  "${{MEGATRON:-.}}/pretrain_gpt.py" "${{MODEL[@]}}" "${{LAYOUT[@]}}" "${{STEP[@]}}" "${{TRAINING[@]}}"
"""


# Since core_v0.16.0 --eval-interval has no default, and training.py divides train_iters by it before the first step.
REPORTS = (option("eval-interval", 1000), option("eval-iters", 0), option("log-interval", 1))


def trial_options(m: DecoderModel) -> tuple[Option, ...]:
    """Return the options of a short training on mock data."""
    return (
        option("mock-data"),
        option("tokenizer-type", "NullTokenizer"),
        option("vocab-size", m.vocab - 1),  # NullTokenizer adds one token, the end of a document
        option("train-iters", TRIAL_STEPS),
        option("lr", 1e-4),
    )


def _notes(m: DecoderModel, nodes: int, slurm: bool) -> str:
    notes = ["Without arguments it trains on mock data for a few steps. Arguments replace the options in TRAINING."]
    if nodes > 1 and not slurm:
        notes.insert(0, f"Run it on each of {nodes} machines, with MASTER_ADDR set to the name of one of them.")
    if m.mtp:
        notes.append("Megatron-LM's MTP layer reads hidden states after the final norm, the plan's model before it.")
    return "".join(f"# {note}\n" for note in notes)


def _lines(options: Iterable[Option]) -> str:
    return "".join(f"  {shlex.join(one.words)}\n" for one in options)
