"""Rules of a step: batch, sequence, microbatch groups, recompute, precision."""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm

import numpy as np

from megaloom.planner.contract.choices import GradReduce, Module, ModuleSet
from megaloom.planner.contract.devices import a
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Column
from megaloom.planner.contract.workload import Precision

from .divisors import divisors, multiples, nearest
from .rule import (
    Case,
    L,
    Owner,
    Rule,
    Truth,
    Words,
    all_of,
)


def _batch(case: Case[L]) -> Truth:
    holds: Truth = case.workload.batch % (case.layout.dp * case.layout.micro_batch) == 0
    return holds


def _batch_text(case: Case[Layout]) -> Words:
    x, batch = case.layout, case.workload.batch
    unit = x.dp * x.micro_batch
    fix = f"use --batch {multiples(batch, unit)}"
    if batch % x.dp == 0:
        fix += f", or --micro-batch {nearest(x.micro_batch, divisors(batch // x.dp))}"
    return f"a batch of {batch} is not a multiple of dp {x.dp} x micro-batch {x.micro_batch} = {unit}", fix


def _fills_pipeline(case: Case[L], group: int | Column) -> Truth:
    """Return True if each group of micro-batches, also the last, has at least pp of them."""
    x, m = case.layout, case.layout.microbatches(case.workload.batch)
    rest = m % np.maximum(1, group)
    holds: Truth = (group >= x.pp) & (group <= m) & ((rest == 0) | (rest >= x.pp))
    return holds


def _vpp_microbatches(case: Case[L]) -> Truth:
    x = case.layout
    holds: Truth = (x.vpp == 1) | (x.microbatch_group != 0) | (_batch(case) == 0) | _fills_pipeline(case, x.pp)
    return holds


def _vpp_microbatches_text(case: Case[Layout]) -> Words:
    x, batch = case.layout, case.workload.batch
    unit, m = x.dp * x.micro_batch, x.microbatches(batch)
    message = f"vpp {x.vpp} runs micro-batches in groups of pp {x.pp}, but there are {m} of them"
    other = f", --microbatch-group {m}" if m > x.pp else ""
    return message, f"use vpp 1{other}, or --batch {multiples(batch, unit * x.pp)}"


def _microbatch_group(case: Case[L]) -> Truth:
    x = case.layout
    holds: Truth = (
        (x.microbatch_group == 0) | (x.vpp == 1) | (_batch(case) == 0) | _fills_pipeline(case, x.microbatch_group)
    )
    return holds


def _microbatch_group_text(case: Case[Layout]) -> Words:
    x, m = case.layout, case.layout.microbatches(case.workload.batch)
    allowed = [n for n in range(x.pp, m + 1) if _fills_pipeline(case, n)]
    message = f"{m} micro-batches in groups of {x.microbatch_group} leave a group smaller than pp {x.pp}"
    return message, f"use --microbatch-group {nearest(x.microbatch_group, allowed)}" if allowed else "use vpp 1"


def _group_vpp(case: Case[L]) -> Truth:
    holds: Truth = (case.layout.microbatch_group == 0) | (case.layout.vpp > 1)
    return holds


def _group_vpp_text(case: Case[Layout]) -> Words:
    group = case.layout.microbatch_group
    return f"`--microbatch-group {group}` needs vpp of at least 2, got 1", "use --microbatch-group 0"


def _seq(case: Case[L]) -> Truth:
    x = case.layout
    zigzag, parts = np.where(x.cp > 1, 2 * x.cp, 1), np.where(x.sequence_parallel, x.cp * x.tp, 1)
    return all_of((seq % zigzag == 0) & (seq % parts == 0) for seq in _lengths(case))


def _lengths(case: Case[L]) -> tuple[int, ...]:
    """Return the lengths of the sequences that cp and sequence parallelism divide, the workload's first."""
    return (case.workload.seq, *case.requirements.lengths)


def _seq_text(case: Case[Layout]) -> Words:
    x = case.layout
    unit = lcm(2 * x.cp if x.cp > 1 else 1, x.cp * x.tp if x.sequence_parallel else 1)
    seq = next(seq for seq in _lengths(case) if seq % unit)
    units = [f"2 x cp {x.cp}"] if x.cp > 1 else []
    if x.sequence_parallel:
        units.append(f"cp {x.cp} x tp {x.tp}" if x.cp > 1 else f"tp {x.tp}")
    use = "use --seq" if seq == case.workload.seq else "declare a sequence of"
    return (
        f"a sequence of {seq} is not a multiple of {' and '.join(units)}",
        f"{use} {multiples(seq, unit)}",
    )


def _positions(case: Case[L]) -> Truth:
    return all(case.workload.seq <= rows for rows in case.requirements.learned_positions)


def _positions_text(case: Case[Layout]) -> Words:
    rows = min(case.requirements.learned_positions)
    return f"a sequence of {case.workload.seq} is longer than the {rows} learned positions", f"use --seq {rows} or less"


def _recompute(case: Case[L]) -> Truth:
    holds: Truth = (case.requirements.blocks > 0) | (case.layout.full_recompute == 0)
    return holds


def _recompute_text(case: Case[Layout]) -> Words:
    return "full recompute recomputes blocks, but the model has no repeated blocks", "use --recompute none or selective"


def _recompute_layers(case: Case[L]) -> Truth:
    x = case.layout
    holds: Truth = (x.recompute_layers == 0) | (x.selective_recompute == 0)
    return holds


def _recompute_none(case: Case[L]) -> Truth:
    x = case.layout
    holds: Truth = (x.recompute_layers == 0) | (x.selective_recompute == 1) | (x.full_recompute == 1)
    return holds


def _recompute_layers_text(case: Case[Layout]) -> Words:
    n = case.layout.recompute_layers
    message = f"`--recompute-layers {n}` needs `--recompute full`"
    return message, "use --recompute full, or --recompute-layers 0"


CHECKED = (Module.MLA_UP_PROJ, Module.MOE_ACT)  # the modules whose presence megatron-core checks


def _has_modules(case: Case[L], among: Iterable[Module]) -> Truth:
    """Return True if the model has each of these modules that is recomputed."""
    holds: Truth = case.layout.recomputed_module_bits & ModuleSet({*among} - {*case.requirements.modules}) == 0
    return holds


def _recompute_parts(case: Case[L]) -> Truth:
    return _has_modules(case, CHECKED)


def _recompute_modules(case: Case[L]) -> Truth:
    holds: Truth = _has_modules(case, {*Module} - {*CHECKED}) & (case.layout.unused_modules == 0)
    return holds


def _recompute_modules_text(case: Case[Layout]) -> Words:
    x, has = case.layout, case.requirements.modules
    fix = "use --recompute none"
    if has:
        fix = f"use --recompute-modules with any of {', '.join(has)}, or --recompute none"
    if x.unused_modules:
        return f"`--recompute {x.recompute}` recomputes no modules, but names {', '.join(x.recompute_modules)}", fix
    return f"the model has no {', '.join(m for m in x.recomputed_modules if m not in has)} to recompute", fix


def _precision(case: Case[L]) -> Truth:
    return case.workload.precision in case.cluster.device.flops


def _precision_text(case: Case[Layout]) -> Words:
    device, precision = case.cluster.device, case.workload.precision
    return f"{a(device.name)} has no known peak FLOP/s in {precision}", f"use --precision {' or '.join(device.flops)}"


def _grad_reduce(case: Case[L]) -> Truth:
    holds: Truth = (case.layout.grad_reduce == GradReduce.FP32) | (case.workload.precision.wide is Precision.BF16)
    return holds


def _grad_reduce_text(case: Case[Layout]) -> Words:
    x, wide = case.layout, case.workload.precision.wide
    message = f"`--grad-reduce {x.grad_reduce}` needs weights in {x.grad_reduce}, and `--precision {wide}` has none"
    return message, f"use --grad-reduce {GradReduce.FP32}, or --precision {Precision.BF16}"


STEP_RULES = (
    Rule(
        id="batch",
        sentence="dp x micro-batch divides the batch.",
        fix="use another --batch or --micro-batch",
        owner=Owner.CORE,
        source="num_microbatches_calculator.py:340",
        holds=_batch,
        explain=_batch_text,
    ),
    Rule(
        id="vpp-microbatches",
        sentence="With vpp above 1, pp divides the number of micro-batches, or `--microbatch-group` sets another "
        "size of groups.",
        fix="use another --batch, --micro-batch or --microbatch-group, or vpp 1",
        owner=Owner.CORE,
        source="schedules.py:1003 and 1015",
        holds=_vpp_microbatches,
        explain=_vpp_microbatches_text,
    ),
    Rule(
        id="microbatch-group",
        sentence="Each group of micro-batches, also the last, has at least pp of them.",
        fix="use a --microbatch-group of at least pp that leaves no remainder, or a remainder of at least pp",
        owner=Owner.CORE,
        source="schedules.py:1003 and 1015",
        holds=_microbatch_group,
        explain=_microbatch_group_text,
    ),
    Rule(
        id="group-vpp",
        sentence="`--microbatch-group` needs vpp of at least 2.",
        fix="use --microbatch-group 0, or vpp 2 or more",
        owner=Owner.PLANNER,
        source="megatron-core accepts it and ignores the groups",
        holds=_group_vpp,
        explain=_group_vpp_text,
    ),
    Rule(
        id="seq",
        sentence="The sequence is a multiple of 2 x cp (with cp above 1) and of cp x tp (with sequence parallelism).",
        fix="use another --seq",
        owner=Owner.CORE,
        source="utils.py:2025; mappings.py:68 and 172",
        holds=_seq,
        explain=_seq_text,
    ),
    Rule(
        id="positions",
        sentence="The sequence is no longer than the table of learned positions.",
        fix="use a smaller --seq",
        owner=Owner.CALLERS,
        source="Megatron-LM's validate_args",
        holds=_positions,
        explain=_positions_text,
    ),
    Rule(
        id="recompute-blocks",
        sentence="Full recompute needs a model with repeated blocks.",
        fix="use --recompute none or selective",
        owner=Owner.PLANNER,
        source="megatron-core recomputes whole blocks, and the planner finds blocks by `repeat`",
        holds=_recompute,
        explain=_recompute_text,
    ),
    Rule(
        id="recompute-layers",
        sentence="`--recompute-layers` is 0 with `--recompute selective`.",
        fix="use --recompute full, or --recompute-layers 0",
        owner=Owner.CORE,
        source="transformer_config.py:1182",
        holds=_recompute_layers,
        explain=_recompute_layers_text,
    ),
    Rule(
        id="recompute-none",
        sentence="`--recompute-layers` is 0 with `--recompute none`.",
        fix="use --recompute full, or --recompute-layers 0",
        owner=Owner.PLANNER,
        source="megatron-core accepts it and recomputes nothing",
        holds=_recompute_none,
        explain=_recompute_layers_text,
    ),
    Rule(
        id="recompute-parts",
        sentence="Selective recompute of mla_up_proj needs latent attention; selective recompute of moe_act needs "
        "experts.",
        fix="use modules that the model has, or --recompute none",
        owner=Owner.CORE,
        source="transformer_config.py:1214 and 1219",
        holds=_recompute_parts,
        explain=_recompute_modules_text,
    ),
    Rule(
        id="recompute-modules",
        sentence="Selective recompute names modules that the model has.",
        fix="use modules that the model has, or --recompute none",
        owner=Owner.PLANNER,
        source="megatron-core accepts others and recomputes nothing",
        holds=_recompute_modules,
        explain=_recompute_modules_text,
    ),
    Rule(
        id="precision",
        sentence="The peak FLOP/s of the device is known for the precision.",
        fix="use another --precision or device",
        owner=Owner.PLANNER,
        source="without it, no step can be priced",
        holds=_precision,
        explain=_precision_text,
    ),
    Rule(
        id="grad-reduce",
        sentence="`--grad-reduce bf16` needs weights in bf16: `--precision bf16`, fp8, mxfp8 or nvfp4.",
        fix="use --grad-reduce fp32, or --precision bf16",
        owner=Owner.PLANNER,
        source="megatron-core accepts it and reduces gradients in the format of the weights "
        "(distributed_data_parallel.py:147)",
        holds=_grad_reduce,
        explain=_grad_reduce_text,
    ),
)
