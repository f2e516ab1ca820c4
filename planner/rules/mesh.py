"""Rules of the device mesh: the number of devices, and axes that need other axes."""

from __future__ import annotations

from math import lcm

from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision

from .divisors import divisors, nearest
from .rule import (
    Case,
    Owner,
    Rule,
    Truth,
    Words,
)


def least_devices(layout: Layout) -> int:
    """Return the fewest devices for these degrees; dense layers and experts share the devices of a pipeline rank."""
    return layout.pp * lcm(layout.tp * layout.cp, layout.ep * layout.etp)


def _world(case: Case) -> Truth:
    return case.layout.world == case.cluster.count


def _world_text(case: Case) -> Words:
    x, count = case.layout, case.cluster.count
    inner = x.tp * x.pp * x.cp
    message = f"dp {x.dp} x tp {x.tp} x pp {x.pp} x cp {x.cp} takes {x.world} devices, and {case.cluster} has {count}"
    if count % inner == 0:
        return message, f"dp {count // inner} takes them all"
    fix = f"tp x pp x cp = {inner} must divide {count}: {nearest(inner, divisors(count))} would"
    return message, f"{fix}, or {_enough(least_devices(x), count, case.cluster):,} devices"


def _expert_grid(case: Case) -> Truth:
    x = case.layout
    return x.world % (x.etp * x.ep * x.pp) == 0


def _expert_grid_text(case: Case) -> Words:
    x, need = case.layout, least_devices(case.layout)
    dense, experts = x.tp * x.cp, x.ep * x.etp
    which = "the larger" if need == x.pp * max(dense, experts) else "the least common multiple"
    message = (
        f"pp {x.pp} x {need // x.pp} ({which} of tp x cp = {dense} and ep x etp = {experts}) needs {need:,} devices "
        f"or a multiple, and there are {x.world:,}"
    )
    experts_of = [size for _, size in case.requirements.sizes("ep")]
    ways = []
    if x.world % (x.pp * x.etp) == 0:
        ways.append(f"ep {nearest(x.ep, divisors(x.world // (x.pp * x.etp), *experts_of))}")
    if pps := [n for n in divisors(x.world // dense) if x.world % (n * experts) == 0]:
        ways.append(f"pp {nearest(x.pp, pps)}")
    return message, ", or ".join([*ways, f"{_enough(need, x.world, case.cluster):,} devices would"])


def _enough(unit: int, count: int, cluster: Cluster) -> int:
    """The least multiple of `unit` from `count` devices on that fills nodes."""
    few = -(-count // unit) * unit
    whole = lcm(unit, cluster.per_node)
    return few if few <= cluster.per_node else -(-count // whole) * whole


def _no_experts(case: Case) -> Truth:
    return (case.layout.ep == 1) | case.requirements.experts


def _no_experts_text(case: Case) -> Words:
    return f"ep {case.layout.ep} divides experts, and the model has none", "ep 1"


def _etp_experts(case: Case) -> Truth:
    return (case.layout.etp == 1) | case.requirements.experts


def _etp_experts_text(case: Case) -> Words:
    return f"etp {case.layout.etp} divides each expert, and the model has none", "etp 1"


def _expert_precision(case: Case) -> Truth:
    return (case.layout.ep == 1) | (case.workload.precision is not Precision.FP16)


def _expert_precision_text(case: Case) -> Words:
    return f"ep {case.layout.ep} divides experts, and they train in fp16", "bf16 would, or ep 1"


def _sequence_parallel(case: Case) -> Truth:
    return (case.layout.tp > 1) | (case.layout.sequence_parallel == 0)


def _sequence_parallel_text(case: Case) -> Words:
    return "sequence parallelism divides over tp, and tp is 1", "tp at least 2, or sequence_parallel off"


def _moe_sequence_parallel(case: Case) -> Truth:
    return (not case.requirements.experts) | (case.layout.tp == 1) | (case.layout.sequence_parallel == 1)


def _moe_sequence_parallel_text(case: Case) -> Words:
    return f"experts under tp {case.layout.tp} need sequence parallelism", "sequence_parallel on, or tp 1"


def _vpp(case: Case) -> Truth:
    return (case.layout.vpp == 1) | (case.layout.pp > 1)


def _vpp_text(case: Case) -> Words:
    return f"vpp {case.layout.vpp} interleaves the chunks of pipeline ranks, and pp is 1", "vpp 1, or pp at least 2"


def _stages(case: Case) -> Truth:
    return case.layout.pp * case.layout.vpp <= case.requirements.max_stages


def _stages_text(case: Case) -> Words:
    x, most = case.layout, case.requirements.max_stages
    message = f"pp {x.pp} x vpp {x.vpp} is {x.pp * x.vpp} stages, and the model can be cut into {most} at most"
    return message, f"vpp {most // x.pp} would" if x.pp <= most else f"pp {most} with vpp 1 would"


MESH_RULES = (
    Rule(
        "world",
        "dp x tp x pp x cp is the number of devices.",
        "tp x pp x cp that divides the devices, and dp what is left",
        Owner.CORE,
        "parallel_state.py:741, 743 and 793",
        _world,
        _world_text,
    ),
    Rule(
        "expert-grid",
        "etp x ep x pp divides the number of devices, because experts share the devices of the dense layers. The "
        "number is a multiple of pp x lcm(tp x cp, ep x etp).",
        "a smaller ep, etp or pp, or more devices",
        Owner.CORE,
        "parallel_state.py:793",
        _expert_grid,
        _expert_grid_text,
    ),
    Rule(
        "no-experts",
        "ep is 1 without experts.",
        "ep 1",
        Owner.CORE,
        "transformer_config.py:1049",
        _no_experts,
        _no_experts_text,
    ),
    Rule(
        "etp-experts",
        "etp is 1 without experts.",
        "etp 1",
        Owner.PLANNER,
        "megatron-core takes it, and divides nothing by it",
        _etp_experts,
        _etp_experts_text,
    ),
    Rule(
        "ep-fp16",
        "ep is 1 in fp16.",
        "bf16, or ep 1",
        Owner.CALLERS,
        "Megatron-LM's validate_args",
        _expert_precision,
        _expert_precision_text,
    ),
    Rule(
        "sp-tp",
        "Sequence parallelism needs tp.",
        "sequence_parallel off, or tp at least 2",
        Owner.CORE,
        "model_parallel_config.py:411",
        _sequence_parallel,
        _sequence_parallel_text,
    ),
    Rule(
        "moe-sp",
        "Experts under tp need sequence parallelism.",
        "sequence_parallel on, or tp 1",
        Owner.CORE,
        "moe_layer.py:380",
        _moe_sequence_parallel,
        _moe_sequence_parallel_text,
    ),
    Rule(
        "vpp-pp",
        "vpp needs pp.",
        "vpp 1, or pp at least 2",
        Owner.CORE,
        "parallel_state.py:747",
        _vpp,
        _vpp_text,
    ),
    Rule(
        "stages",
        "Each of the pp x vpp stages holds a part of the model.",
        "a smaller vpp or pp",
        Owner.PLANNER,
        "megatron-core takes stages without a layer, whose devices only pass on what they get",
        _stages,
        _stages_text,
    ),
)
