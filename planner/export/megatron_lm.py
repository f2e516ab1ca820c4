"""A plan as the options of Megatron-LM's pretrain_gpt.py, those of its release core_v0.16.1.

Protocol: `options` are the model, its layout and what a step is, as options in Megatron-LM's own names; `script` is
the shell script that starts a training with them. What has no option is refused by its name.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from attrs import frozen

from megaloom.dsl import Graph, LayerNorm, RMSNorm
from megaloom.planner.contract.layout import (
    INNER,
    Layout,
    Module,
    Overlap,
    Precision,
    Recompute,
    Workload,
)
from megaloom.planner.contract.plans import Plan
from megaloom.planner.rules.capabilities import wrong

from .decoder import GPT, cannot, gpt
from .megatron_lm_layers import attention, experts, feed_forward
from .option import Option, option
from .slurm import MEET, head, hosts
from .whole_layers import (
    Part,
    even,
    layout,
    parts,
    recomputed,
)

NAME = "Megatron-LM"
VERSION = "core_v0.16.1"
STEPS = 20  # of a trial on made-up tokens


@frozen
class Options:
    """What the program is told, in the groups in which people read it."""

    model: tuple[Option, ...]
    layout: tuple[Option, ...]
    step: tuple[Option, ...]


def options(plan: Plan, graph: Graph, target: str = NAME) -> Options:
    """The plan as options. Raises UserError that names what none of them says."""
    read = gpt(graph, target)
    starts = tuple(stage.start for stage in plan.stages)
    for mistaken in wrong(plan.layout, graph, plan.workload, plan.cluster, starts):
        cannot(target, f"{mistaken.message}: it computes wrong gradients [{mistaken.rule}]", mistaken.fix)
    cut = parts(plan, read, graph, target)
    return Options(
        model=tuple(_model(read, plan.workload, target)),
        layout=(*_layout(plan.layout, read), *_stages(plan.layout, cut), *_memory(plan.layout, read, target)),
        step=tuple(_step(plan, read, target)),
    )


def _model(m: GPT, workload: Workload, target: str) -> Iterator[Option]:
    yield option("num-layers", len(m.layers))
    yield option("hidden-size", m.embed)
    if m.ahead:
        yield option("mtp-num-layers", m.ahead)
    yield from attention(m, target)
    yield from feed_forward(m, target)
    yield from experts(m, target)
    yield from _norm(m, target)
    yield option("attention-dropout", getattr(m.attention, "dropout", 0.0))
    yield option("hidden-dropout", m.dropout)
    yield option("seq-length", workload.seq)
    yield option("max-position-embeddings", m.positions or workload.seq)
    yield option("make-vocab-size-divisible-by", 1)  # beyond what tensor parallelism asks for
    if not m.tied:
        yield option("untie-embeddings-and-output-weights")


def _norm(m: GPT, target: str) -> Iterator[Option]:
    if isinstance(m.norm, LayerNorm) and not m.norm.bias:
        cannot(target, f"{m.norm}: its LayerNorm always shifts")
    yield option("normalization", "RMSNorm" if isinstance(m.norm, RMSNorm) else "LayerNorm")
    yield option("norm-epsilon", m.norm.eps)
    if m.norm.plus_one:
        yield option("apply-layernorm-1p")


def _layout(x: Layout, m: GPT) -> Iterator[Option]:
    yield option("tensor-model-parallel-size", x.tp)
    if x.sequence_parallel:
        yield option("sequence-parallel")
    yield option("pipeline-model-parallel-size", x.pp)
    yield option("context-parallel-size", x.cp)
    if m.moe:
        yield option("expert-model-parallel-size", x.ep)
        yield option("expert-tensor-parallel-size", x.etp)


def _stages(x: Layout, cut: tuple[Part, ...]) -> Iterator[Option]:
    """How many layers each stage has: said at all where it is not what Megatron-LM does unasked."""
    if x.pp == 1:
        return
    each = even(cut)
    if each is None:
        yield option("pipeline-model-parallel-layout", layout(cut))
    elif x.vpp > 1:
        yield option("num-layers-per-virtual-pipeline-stage", each)
    if x.microbatch_group:
        yield option("microbatch-group-size-per-virtual-pipeline-stage", x.microbatch_group)


def _memory(x: Layout, m: GPT, target: str) -> Iterator[Option]:
    first = recomputed(x, m, target)
    if first != 0:
        yield option("recompute-granularity", "full")
        yield option("recompute-method", "block" if first else "uniform")  # the first ones, or all of them one by one
        yield option("recompute-num-layers", first or 1)
    elif x.recompute is Recompute.SELECTIVE:
        yield option("recompute-granularity", "selective")
        yield option("recompute-modules", *x.modules)
    if x.distributed_optimizer:
        yield option("use-distributed-optimizer")
    if x.dp * x.cp > 1:  # else there is nothing to reduce or gather
        yield from (option(OVERLAPS[o]) for o in x.overlaps if o not in INNER)
    yield from (option(OVERLAPS[o]) for o in x.overlaps if o in INNER)


OVERLAPS = {
    Overlap.GRADIENTS: "overlap-grad-reduce",
    Overlap.WEIGHTS: "overlap-param-gather",
    Overlap.TENSOR: "tp-comm-overlap",
    Overlap.EXPERTS: "overlap-moe-expert-parallel-comm",
}
PRECISION = {
    Precision.FP32: (),
    Precision.BF16: (option("bf16"),),
    Precision.FP16: (option("fp16"), option("accumulate-allreduce-grads-in-fp32")),  # with bf16 they always are
    Precision.FP8: (option("bf16"), option("fp8-format", "hybrid"), option("fp8-recipe", "tensorwise")),
    Precision.MXFP8: (option("bf16"), option("fp8-format", "e4m3"), option("fp8-recipe", "mxfp8")),
    Precision.NVFP4: (option("bf16"), option("fp4-format", "e2m1"), option("fp4-recipe", "nvfp4")),
}


def _step(plan: Plan, m: GPT, target: str) -> Iterator[Option]:
    precision = plan.workload.precision
    yield option("micro-batch-size", plan.layout.micro_batch)
    yield option("global-batch-size", plan.workload.batch)
    yield from PRECISION[precision]
    if m.moe and precision.wide is Precision.BF16:
        yield option("moe-grouped-gemm")  # one kernel for all experts: Megatron-LM has it for bf16 only
    elif Module.MOE_ACT in plan.layout.modules:
        cannot(target, f"recompute of moe_act in {precision}", "plan with --precision bf16, or other modules")


def job(plan: Plan, graph: Graph) -> str:
    """The same as a script for sbatch."""
    return script(plan, graph, head(plan.cluster, graph.name))


def script(plan: Plan, graph: Graph, slurm: str = "") -> str:
    """A shell script that starts Megatron-LM on every node of the cluster, given where to meet, or as Slurm says."""
    said, (nodes, each) = options(plan, graph), hosts(plan.cluster)
    read = gpt(graph, NAME)
    trial = (
        option("mock-data"),
        option("tokenizer-type", "NullTokenizer"),
        option("vocab-size", read.vocab - 1),  # it adds a token, for the end of a document
        option("train-iters", STEPS),
        option("lr", 1e-4),
    )
    # Before Blackwell, collectives that overlap with computation need it, and Megatron-LM insists on it.
    queues = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if plan.layout.tp * plan.layout.cp > 1 else ""
    ahead = "# What predicts a token ahead reads hidden states behind the last norm; in the plan's model, before it.\n"
    where = (
        f"# To be run on each of {nodes} machines, with MASTER_ADDR one of them.\n" if nodes > 1 and not slurm else ""
    )
    return f"""#!/usr/bin/env bash
{slurm}# {graph.name} on {plan.cluster}: {plan.layout}
# For pretrain_gpt.py of Megatron-LM {VERSION}, whose folder is $MEGATRON.
{where}# What is given to this script takes the place of TRAINING, a trial on made-up tokens.
{ahead if read.ahead else ""}set -euo pipefail
{MEET if slurm else ""}{queues}
MODEL=(
{_lines(said.model)})
LAYOUT=(
{_lines(said.layout)})
STEP=(
{_lines(said.step)})
TRAINING=(
{_lines(trial)})
if (( $# )); then TRAINING=("$@"); fi

{"srun " if slurm else ""}torchrun --nnodes {nodes} --nproc-per-node {each} \\
  --rdzv-backend c10d --rdzv-id "${{SLURM_JOB_ID:-megaloom}}" \\
  --rdzv-endpoint "${{MASTER_ADDR:-localhost}}:${{MASTER_PORT:-29500}}" \\
  "${{MEGATRON:-.}}/pretrain_gpt.py" "${{MODEL[@]}}" "${{LAYOUT[@]}}" "${{STEP[@]}}" "${{TRAINING[@]}}"
"""


def _lines(said: Iterable[Option]) -> str:
    return "".join(f"  {shlex.join(one.words)}\n" for one in said)
