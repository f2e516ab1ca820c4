"""Rules of the device mesh: the number of devices, and axes that need other axes."""

from __future__ import annotations

from math import lcm

from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.model.sequence_pairs import sequence_pair

from .divisors import divisors, nearest
from .rule import (
    Case,
    L,
    Owner,
    Rule,
    Truth,
    Words,
)


def least_devices(layout: Layout) -> int:
    """Return the fewest devices for these degrees; dense layers and experts share the devices of a pipeline rank."""
    return layout.pp * lcm(layout.tp * layout.cp, layout.ep * layout.etp)


def _world(case: Case[L]) -> Truth:
    holds: Truth = case.layout.world == case.cluster.count
    return holds


def _world_text(case: Case[Layout]) -> Words:
    x, count = case.layout, case.cluster.count
    inner = x.tp * x.pp * x.cp
    message = f"dp {x.dp} x tp {x.tp} x pp {x.pp} x cp {x.cp} takes {x.world} devices, but {case.cluster} has {count}"
    if count % inner == 0:
        return message, f"use dp {count // inner}"
    fix = f"use tp x pp x cp = {nearest(inner, divisors(count))}, which divide {count}"
    return message, f"{fix}, or {_enough_devices(least_devices(x), count, case.cluster):,} devices"


def _expert_grid(case: Case[L]) -> Truth:
    x = case.layout
    holds: Truth = x.world % (x.etp * x.ep * x.pp) == 0
    return holds


def _expert_grid_text(case: Case[Layout]) -> Words:
    x, need = case.layout, least_devices(case.layout)
    dense, experts = x.tp * x.cp, x.ep * x.etp
    relation = "the larger" if need == x.pp * max(dense, experts) else "the least common multiple"
    message = (
        f"pp {x.pp} x {need // x.pp} ({relation} of tp x cp = {dense} and ep x etp = {experts}) needs {need:,} devices "
        f"or a multiple, but there are {x.world:,}"
    )
    expert_counts = [size for _, size in case.requirements.sizes("ep")]
    fixes = []
    if x.world % (x.pp * x.etp) == 0:
        fixes.append(f"ep {nearest(x.ep, divisors(x.world // (x.pp * x.etp), *expert_counts))}")
    if pps := [n for n in divisors(x.world // dense) if x.world % (n * experts) == 0]:
        fixes.append(f"pp {nearest(x.pp, pps)}")
    fixes.append(f"{_enough_devices(need, x.world, case.cluster):,} devices")
    return message, f"use {', or '.join(fixes)}"


def _enough_devices(unit: int, count: int, cluster: Cluster) -> int:
    """Return the smallest multiple of `unit` that is at least `count` and fills whole nodes or lies within one."""
    least = -(-count // unit) * unit
    whole_nodes = lcm(unit, cluster.per_node)
    return least if least <= cluster.per_node else -(-count // whole_nodes) * whole_nodes


def _no_experts(case: Case[L]) -> Truth:
    holds: Truth = (case.layout.ep == 1) | case.requirements.experts
    return holds


def _no_experts_text(case: Case[Layout]) -> Words:
    return f"ep {case.layout.ep} shards experts, but the model has none", "use ep 1"


def _etp_experts(case: Case[L]) -> Truth:
    holds: Truth = (case.layout.etp == 1) | case.requirements.experts
    return holds


def _etp_experts_text(case: Case[Layout]) -> Words:
    return f"etp {case.layout.etp} shards each expert, but the model has none", "use etp 1"


def _sequence_parallel(case: Case[L]) -> Truth:
    holds: Truth = (case.layout.tp > 1) | (case.layout.sequence_parallel == 0)
    return holds


def _sequence_parallel_text(case: Case[Layout]) -> Words:
    return "sequence parallelism needs tp above 1, got 1", "use tp 2 or more, or --no-sequence-parallel"


def _moe_sequence_parallel(case: Case[L]) -> Truth:
    holds: Truth = (not case.requirements.experts) | (case.layout.tp == 1) | (case.layout.sequence_parallel == 1)
    return holds


def _moe_sequence_parallel_text(case: Case[Layout]) -> Words:
    return f"experts with tp {case.layout.tp} need sequence parallelism", "add --sequence-parallel, or use tp 1"


def _vpp(case: Case[L]) -> Truth:
    holds: Truth = (case.layout.vpp == 1) | (case.layout.pp > 1)
    return holds


def _vpp_text(case: Case[Layout]) -> Words:
    return (
        f"vpp {case.layout.vpp} interleaves chunks of pipeline ranks, but pp is 1",
        "use vpp 1, or pp 2 or more",
    )


def _stages(case: Case[L]) -> Truth:
    return case.layout.pp * case.layout.vpp <= case.requirements.max_stages


def _stages_text(case: Case[Layout]) -> Words:
    x, most = case.layout, case.requirements.max_stages
    message = f"pp {x.pp} x vpp {x.vpp} is {x.pp * x.vpp} stages, but the model can be cut into at most {most}"
    return message, f"use vpp {most // x.pp}" if x.pp <= most else f"use pp {most} with vpp 1"


def _sequence_pairs(case: Case[L]) -> Truth:
    x = case.layout
    holds: Truth = ((x.cp == 1) & ((x.tp == 1) | (x.sequence_parallel == 0))) | (sequence_pair(case.graph) is None)
    return holds


def _sequence_pairs_text(case: Case[Layout]) -> Words:
    node, dims = sequence_pair(case.graph) or ("", ())
    by = f"cp {case.layout.cp}" if case.layout.cp > 1 else "sequence parallelism"
    return (
        f"{node} computes a value over both {' and '.join(dims)}, and with {by} a device has only its parts of them",
        "use --cp 1 without --sequence-parallel, or an attention layer, which exchanges the parts",
    )


MESH_RULES = (
    Rule(
        id="world",
        sentence="dp x tp x pp x cp is the number of devices.",
        fix="use tp x pp x cp that divides the devices, and the quotient as dp",
        owner=Owner.CORE,
        source="parallel_state.py:741, 743 and 793",
        holds=_world,
        explain=_world_text,
    ),
    Rule(
        id="expert-grid",
        sentence="etp x ep x pp divides the number of devices, because experts share the devices of the dense layers. "
        "The number is a multiple of pp x lcm(tp x cp, ep x etp).",
        fix="use a smaller ep, etp or pp, or more devices",
        owner=Owner.CORE,
        source="parallel_state.py:793",
        holds=_expert_grid,
        explain=_expert_grid_text,
    ),
    Rule(
        id="no-experts",
        sentence="ep is 1 without experts.",
        fix="use ep 1",
        owner=Owner.CORE,
        source="transformer_config.py:1049",
        holds=_no_experts,
        explain=_no_experts_text,
    ),
    Rule(
        id="etp-experts",
        sentence="etp is 1 without experts.",
        fix="use etp 1",
        owner=Owner.PLANNER,
        source="megatron-core accepts it and shards nothing over it",
        holds=_etp_experts,
        explain=_etp_experts_text,
    ),
    Rule(
        id="sp-tp",
        sentence="Sequence parallelism needs tp above 1.",
        fix="use --no-sequence-parallel, or tp 2 or more",
        owner=Owner.CORE,
        source="model_parallel_config.py:411",
        holds=_sequence_parallel,
        explain=_sequence_parallel_text,
    ),
    Rule(
        id="moe-sp",
        sentence="Experts with tp above 1 need sequence parallelism.",
        fix="add --sequence-parallel, or use tp 1",
        owner=Owner.CORE,
        source="moe_layer.py:380",
        holds=_moe_sequence_parallel,
        explain=_moe_sequence_parallel_text,
    ),
    Rule(
        id="vpp-pp",
        sentence="vpp above 1 needs pp above 1.",
        fix="use vpp 1, or pp 2 or more",
        owner=Owner.CORE,
        source="parallel_state.py:747",
        holds=_vpp,
        explain=_vpp_text,
    ),
    Rule(
        id="stages",
        sentence="Each of the pp x vpp stages holds a part of the model.",
        fix="use a smaller vpp or pp",
        owner=Owner.PLANNER,
        source="megatron-core accepts stages without a layer, whose devices compute nothing",
        holds=_stages,
        explain=_stages_text,
    ),
    Rule(
        id="sequence-pairs",
        sentence="A model with a value over two sequences has cp 1 and no sequence parallelism.",
        fix="use cp 1 without sequence parallelism, or an attention layer",
        owner=Owner.PLANNER,
        source="a device would compute only pairs of positions that are in its parts of both",
        holds=_sequence_pairs,
        explain=_sequence_pairs_text,
    ),
)
