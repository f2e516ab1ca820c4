"""One function under many layouts in one set of processes: starting ranks costs once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from megaloom.planner.contract.plans import Plan
from megaloom.runtime.launch import launcher
from tests.support.limits import LIMIT
from tests.support.parity.rank_pool import process_group

Results = dict[str, list[Any]]  # by the name of a layout, the value of each of its ranks


def under_layouts(function: Callable[[Plan], Any], plans: Mapping[str, Plan]) -> Results:
    """Return what a function returns on each rank of each plan, in as many processes as the largest plan has."""
    world = max(plan.layout.world for plan in plans.values())
    found = launcher.run(_work, (function, dict(plans)), world, timeout=LIMIT)
    ranked = {name: sorted((rank[name] for rank in found if name in rank), key=lambda pair: pair[0]) for name in plans}
    return {name: [value for _, value in pairs] for name, pairs in ranked.items()}


def _work(function: Callable[[Plan], Any], plans: dict[str, Plan]) -> dict[str, tuple[int, Any]]:
    """Return the rank of this process and the value of the function, for each plan of which it is a rank."""
    store: Any = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    out, first = {}, 0
    for name, plan in plans.items():
        members = [(first + k) % size for k in range(plan.layout.world)]
        first = (members[-1] + 1) % size
        if rank in members:
            with process_group(store, name, members.index(rank), len(members)):
                out[name] = members.index(rank), function(plan)
    return out
