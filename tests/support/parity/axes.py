"""The axes of drawn cases, which `make parity` counts."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import TYPE_CHECKING

from megaloom.dsl import MoE, graph
from megaloom.planner.contract.choices import Recompute, Reshard, Shard
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision
from tests.support.parity.feeds import Feed
from tests.support.parity.hf_oracle import HF

if TYPE_CHECKING:
    from tests.support.parity.rank_pool import Case


def remainder(plan: Plan) -> int:
    """Return the micro-batches that are left over from whole groups of an interleaved schedule."""
    x, batch = plan.layout, plan.workload.batch
    return ceil(batch / (x.dp * x.micro_batch)) % x.microbatch_group_size if x.vpp > 1 else 0


def kinds_of_experts(case: Case) -> int:
    """Return the number of different mixtures of experts in the model of a case."""
    return len({n.op for n in graph(case.make()).nodes if isinstance(n.op, MoE)})


OF_LAYOUT: dict[str, Callable[[Layout], bool]] = {
    "tp": lambda x: x.tp > 1,
    "pp": lambda x: x.pp > 1,
    "vpp": lambda x: x.vpp > 1,
    "cp": lambda x: x.cp > 1,
    "dp": lambda x: x.dp > 1,
    "ep": lambda x: x.ep > 1,
    "etp": lambda x: x.etp > 1,
    "sp": lambda x: bool(x.sequence_parallel),
    "shard optimizer": lambda x: x.shard is Shard.OPTIMIZER,
    "shard gradients": lambda x: x.shard is Shard.GRADIENTS,
    "shard weights": lambda x: x.shard is Shard.WEIGHTS,
    "expert shard": lambda x: bool(x.expert_shard),
    "expert shard with tp": lambda x: bool(x.expert_shard) and x.tp > 1,
    "expert shard with cp": lambda x: bool(x.expert_shard) and x.cp > 1,
    "expert shard with vpp": lambda x: bool(x.expert_shard) and x.vpp > 1,
    "reshard step": lambda x: x.reshard is Reshard.STEP,
    "recompute full": lambda x: x.recompute is Recompute.FULL,
    "recompute selective": lambda x: x.recompute is Recompute.SELECTIVE,
    "worlds of 3 or 6": lambda x: x.world % 3 == 0,
    "worlds of 8": lambda x: x.world == 8,
}
OF_CASE: dict[str, Callable[[Case], bool]] = {
    "bf16": lambda c: c.plan.workload.precision is Precision.BF16,
    "reload": lambda c: c.second is not None,
    "group with remainder": lambda c: remainder(c.plan) > 0,
    "several kinds of experts": lambda c: kinds_of_experts(c) > 1,
    "own layers against plain torch": lambda c: "twins.py" in c.model,
    "transformers": lambda c: c.model.startswith(HF),
    "batches of tensors": lambda c: c.feed in (Feed.BATCHES, Feed.FIRST_RANK),
    "own steps": lambda c: c.feed is Feed.OWN_STEP,
    "dropout": lambda c: c.dropout > 0,
}
AXES = (*OF_LAYOUT, *OF_CASE)
WANTED = 50  # draws of each axis


def axes_of(case: Case) -> tuple[str, ...]:
    """Return the axes that a case draws; those of its first layout."""
    found = [name for name, has in OF_LAYOUT.items() if has(case.plan.layout)]
    return (*found, *(name for name, has in OF_CASE.items() if has(case)))
