"""Rules of a step: batch, sequence, microbatch groups, recompute, precision."""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm
from typing import Any

import numpy as np

from megaloom.planner.contract.choices import Module, ModuleSet
from megaloom.planner.contract.devices import a

from .divisors import divisors, multiples, nearest
from .rule import (
    Case,
    Owner,
    Rule,
    Truth,
    Words,
)


def _batch(case: Case) -> Truth:
    return case.workload.batch % (case.layout.dp * case.layout.micro_batch) == 0


def _batch_text(case: Case) -> Words:
    x, batch = case.layout, case.workload.batch
    unit = x.dp * x.micro_batch
    fix = f"a batch of {multiples(batch, unit)} would"
    if batch % x.dp == 0:
        fix += f", or a micro-batch of {nearest(x.micro_batch, divisors(batch // x.dp))}"
    return f"a batch of {batch} does not divide over dp {x.dp} x micro-batch {x.micro_batch} = {unit}", fix


def _grouped(case: Case, group: Any) -> Truth:
    """Whether micro-batches can be run in such groups: each, the last too, keeps all pipeline ranks busy."""
    x, m = case.layout, case.layout.microbatches(case.workload.batch)
    rest = m % np.maximum(1, group)
    return (group >= x.pp) & (group <= m) & ((rest == 0) | (rest >= x.pp))


def _vpp_microbatches(case: Case) -> Truth:
    x = case.layout
    return (x.vpp == 1) | (x.microbatch_group != 0) | (_batch(case) == 0) | _grouped(case, x.pp)


def _vpp_microbatches_text(case: Case) -> Words:
    x, batch = case.layout, case.workload.batch
    unit, m = x.dp * x.micro_batch, x.microbatches(batch)
    message = f"vpp {x.vpp} runs micro-batches in groups of pp {x.pp}, and there are {m} of them"
    other = f", a microbatch_group of {m}" if m > x.pp else ""
    return message, f"vpp 1 would{other}, or a batch of {multiples(batch, unit * x.pp)}"


def _microbatch_group(case: Case) -> Truth:
    x = case.layout
    return (x.microbatch_group == 0) | (x.vpp == 1) | (_batch(case) == 0) | _grouped(case, x.microbatch_group)


def _microbatch_group_text(case: Case) -> Words:
    x, m = case.layout, case.layout.microbatches(case.workload.batch)
    works = [n for n in range(x.pp, m + 1) if _grouped(case, n)]
    message = f"of {m} micro-batches, groups of {x.microbatch_group} are not from pp {x.pp} on, the last one included"
    return message, f"a microbatch_group of {nearest(x.microbatch_group, works)} would" if works else "vpp 1 would"


def _group_vpp(case: Case) -> Truth:
    return (case.layout.microbatch_group == 0) | (case.layout.vpp > 1)


def _group_vpp_text(case: Case) -> Words:
    group = case.layout.microbatch_group
    return f"micro-batches go in groups of {group} where chunks take turns, and vpp is 1", "0 would"


def _seq(case: Case) -> Truth:
    x, seq = case.layout, case.workload.seq
    zigzag, parts = np.where(x.cp > 1, 2 * x.cp, 1), np.where(x.sequence_parallel, x.cp * x.tp, 1)
    return (seq % zigzag == 0) & (seq % parts == 0)


def _seq_text(case: Case) -> Words:
    x, seq = case.layout, case.workload.seq
    said = [f"2 x cp {x.cp}"] if x.cp > 1 else []
    if x.sequence_parallel:
        said.append(f"cp {x.cp} x tp {x.tp}" if x.cp > 1 else f"tp {x.tp}")
    works = multiples(seq, lcm(2 * x.cp if x.cp > 1 else 1, x.cp * x.tp if x.sequence_parallel else 1))
    return f"a sequence of {seq} does not divide over {' and '.join(said)}", f"a sequence of {works} would"


def _positions(case: Case) -> Truth:
    return all(case.workload.seq <= rows for rows in case.requirements.learned_positions)


def _positions_text(case: Case) -> Words:
    rows = min(case.requirements.learned_positions)
    return f"a sequence of {case.workload.seq} is longer than the {rows} learned positions", f"{rows} or less"


def _recompute(case: Case) -> Truth:
    return (case.requirements.blocks > 0) | (case.layout.full_recompute == 0)


def _recompute_text(case: Case) -> Words:
    return "full recompute computes blocks again, and the model repeats none", "recompute none or selective"


def _recompute_layers(case: Case) -> Truth:
    x = case.layout
    return (x.recompute_layers == 0) | (x.selective_recompute == 0)


def _recompute_none(case: Case) -> Truth:
    x = case.layout
    return (x.recompute_layers == 0) | (x.selective_recompute == 1) | (x.full_recompute == 1)


def _recompute_layers_text(case: Case) -> Words:
    n = case.layout.recompute_layers
    return f"recompute_layers {n} counts the blocks of full recompute", "recompute full with 1 or more, or 0 for all"


CHECKED = (Module.MLA_UP_PROJ, Module.MOE_ACT)  # the modules that megatron-core looks for


def _absent(case: Case, among: Iterable[Module]) -> Truth:
    """Whether none of these modules is computed again that the model has not."""
    return case.layout.recomputed_module_bits & ModuleSet({*among} - {*case.requirements.modules}) == 0


def _recompute_parts(case: Case) -> Truth:
    return _absent(case, CHECKED)


def _recompute_modules(case: Case) -> Truth:
    return _absent(case, {*Module} - {*CHECKED}) & (case.layout.unused_modules == 0)


def _recompute_modules_text(case: Case) -> Words:
    x, has = case.layout, case.requirements.modules
    fix = f"recompute selective with any of {', '.join(has)}, or recompute none" if has else "recompute none would"
    if x.unused_modules:
        return f"recompute {x.recompute} computes no modules again, and {', '.join(x.recompute_modules)} are named", fix
    return f"the model has no {', '.join(m for m in x.recomputed_modules if m not in has)} to compute again", fix


def _precision(case: Case) -> Truth:
    return case.workload.precision in case.cluster.device.flops


def _precision_text(case: Case) -> Words:
    device, precision = case.cluster.device, case.workload.precision
    return f"no figure says how fast {a(device.name)} computes in {precision}", f"{' or '.join(device.flops)} would"


STEP_RULES = (
    Rule(
        "batch",
        "dp x micro-batch divides the batch.",
        "another batch or micro-batch",
        Owner.CORE,
        "num_microbatches_calculator.py:340",
        _batch,
        _batch_text,
    ),
    Rule(
        "vpp-microbatches",
        "With vpp, pp divides the number of micro-batches, or they go in groups of another size.",
        "another batch, micro-batch or microbatch_group, or vpp 1",
        Owner.CORE,
        "schedules.py:1003 and 1015",
        _vpp_microbatches,
        _vpp_microbatches_text,
    ),
    Rule(
        "microbatch-group",
        "A group of micro-batches, the last one too, is no smaller than pp.",
        "microbatch_group from pp on, with a rest of none or from pp on",
        Owner.CORE,
        "schedules.py:1003 and 1015",
        _microbatch_group,
        _microbatch_group_text,
    ),
    Rule(
        "group-vpp",
        "`microbatch_group` needs vpp of at least 2.",
        "microbatch_group 0, or vpp at least 2",
        Owner.PLANNER,
        "megatron-core takes it, and does without groups",
        _group_vpp,
        _group_vpp_text,
    ),
    Rule(
        "seq",
        "2 x cp (with cp) divides the sequence, and so does cp x tp (with sequence parallelism).",
        "another sequence",
        Owner.CORE,
        "utils.py:2025; mappings.py:68 and 172",
        _seq,
        _seq_text,
    ),
    Rule(
        "positions",
        "Learned positions reach as far as the sequence.",
        "a shorter sequence",
        Owner.CALLERS,
        "Megatron-LM's validate_args",
        _positions,
        _positions_text,
    ),
    Rule(
        "recompute-blocks",
        "Full recompute needs a model with repeated blocks.",
        "recompute none or selective",
        Owner.PLANNER,
        "what megatron-core computes again is a block, and the planner knows those of repeats",
        _recompute,
        _recompute_text,
    ),
    Rule(
        "recompute-layers",
        "`recompute_layers` is 0 with selective recompute.",
        "recompute full, or recompute_layers 0",
        Owner.CORE,
        "transformer_config.py:1182",
        _recompute_layers,
        _recompute_layers_text,
    ),
    Rule(
        "recompute-none",
        "`recompute_layers` is 0 without recompute.",
        "recompute full with 1 or more, or recompute_layers 0",
        Owner.PLANNER,
        "megatron-core takes it, and computes nothing again",
        _recompute_none,
        _recompute_layers_text,
    ),
    Rule(
        "recompute-parts",
        "Selective recompute of mla_up_proj needs latent attention, that of moe_act experts.",
        "modules that the model has, or recompute none",
        Owner.CORE,
        "transformer_config.py:1214 and 1219",
        _recompute_parts,
        _recompute_modules_text,
    ),
    Rule(
        "recompute-modules",
        "Selective recompute names modules that the model has.",
        "modules that the model has, or recompute none",
        Owner.PLANNER,
        "megatron-core takes others, and computes nothing again",
        _recompute_modules,
        _recompute_modules_text,
    ),
    Rule(
        "precision",
        "The device has a figure for the precision.",
        "another precision or device",
        Owner.PLANNER,
        "it could not be priced",
        _precision,
        _precision_text,
    ),
)
