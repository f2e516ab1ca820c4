"""Write a plan as the TOML file of torchtitan, whose releases up to 0.2.2 read one.

A plan that torchtitan would run otherwise is refused; a small difference is a comment in the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from megaloom.dsl import Graph
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision

from .quoting import title
from .slurm import machines
from .target import Target
from .torchtitan_checks import gathers_float8
from .torchtitan_fields import FLOAT8, HEADS, titan_fields

FLOAT8_GATHERS = ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
ACTIVE_CHUNKS = 3  # max_active_stages of torch's pipelining/schedules.py


def config_toml(plan: Plan, graph: Graph) -> str:
    """Return a plan as torchtitan's TOML file. Raises UserError that names what torchtitan does otherwise."""
    made = titan_fields(plan, graph, Target.TORCHTITAN)
    nodes, each = machines(plan.cluster)
    tables: dict[str, Mapping[str, object]] = {
        "model": {"name": made.flavor.model, "flavor": made.flavor.name, **_converters(plan)},
        "training": made.training,
        "parallelism": made.parallelism,
        "activation_checkpoint": {"mode": str(plan.layout.recompute)},
        "compile": {"enable": True, "components": ["model", "loss"]},
        **_float8(plan),
    }
    head = f"""{title(plan, graph.name)}\
# For torchtitan 0.2.2: torchrun --nnodes {nodes} --nproc-per-node {each} ... -m torchtitan.train --job.config_file THIS
# torchtitan's own model has {made.flavor.own}. That does not change the step time.
{chunks_note(plan.layout)}# Add the tokenizer (model.hf_assets_path), data, steps and learning rate.
"""
    return head + "".join(f"\n[{name}]\n{_table(values)}" for name, values in tables.items())


def _converters(plan: Plan) -> Mapping[str, object]:
    """Return the converter that makes products compute in 8 bits; none for other plans."""
    return {"converters": [FLOAT8]} if plan.workload.precision is Precision.FP8 else {}


def _float8(plan: Plan) -> Mapping[str, Mapping[str, object]]:
    """Return the section of products in 8 bits, with one scale for each tensor. The logits stay in bf16."""
    if plan.workload.precision is not Precision.FP8:
        return {}
    gathers = dict.fromkeys(FLOAT8_GATHERS, True) if gathers_float8(plan) else {}
    return {FLOAT8: {"filter_fqns": [HEADS[Target.TORCHTITAN]], **gathers}}


def chunks_note(x: Layout) -> str:
    """Return a comment on weights that torch's schedule gathers more often than the plan; an empty text if it does not.

    x: the plan's layout.
    """
    if x.dp * x.cp == 1 or x.vpp <= ACTIVE_CHUNKS:
        return ""
    return (
        f"# Of {x.vpp} model chunks a rank, torch's schedule holds the weights of {ACTIVE_CHUNKS} at a time, and\n"
        "# gathers those of the others again. The plan does not price that.\n"
    )


def _table(values: Mapping[str, object]) -> str:
    return "".join(f"{key} = {_toml(value)}\n" for key, value in values.items())


def _toml(value: object) -> str:
    """Return a value as TOML, which writes strings, numbers and lists as JSON does; each item of a list has a line."""
    if isinstance(value, list):
        return "[\n" + "".join(f"  {json.dumps(one)},\n" for one in value) + "]"
    return json.dumps(value)
