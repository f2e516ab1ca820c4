"""The sentence on what a plan gains by sharding gradients or weights over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

from megaloom.planner.contract.choices import Shard
from megaloom.planner.simulate.price import Priced

from .branch_and_bound import search
from .candidates import Candidates
from .device_meshes import MESH_FIELDS, device_mesh
from .infeasible import leanest
from .pricing import Pricer
from .reasons import sharding_reason
from .variant_choices import FixedAxes


def sharding_gains(
    best: Priced, simulated: Sequence[Priced], examined: float, pricer: Pricer, fixed: FixedAxes
) -> tuple[str, ...]:
    """Return what a plan gains by sharding gradients or weights, if it does so and is free not to.

    It is compared with the fastest layout that shards neither. simulated: sorted by step time. examined: seconds up to
    which the search that found them has the best layout of each device mesh; what it has not is searched for.
    """
    if not best.layout.fsdp or {"shard", "expert_shard", "reshard", "replicas"} & {*fixed}:
        return ()
    found = [priced for priced in simulated if not priced.layout.fsdp][:1]
    spaces: list[FixedAxes] = [{}]
    if found and found[0].seconds <= examined:  # a mesh whose best layout shards more may have a faster one than this
        faster = {device_mesh(x.layout) for x in simulated if x.layout.fsdp and x.seconds < found[0].seconds}
        spaces = [dict(zip(MESH_FIELDS, mesh, strict=True)) for mesh in sorted(faster)]
    others = [Candidates(pricer, {**fixed, **space, "shard": Shard.OPTIMIZER}) for space in spaces]
    for candidates in others:
        if candidates.count:
            found += search(candidates, meshes=1, count=1)
    if found:
        return (sharding_reason(best, min(found, key=lambda priced: priced.seconds), None),)
    return (sharding_reason(best, None, leanest(others[0])),) if others[0].count else ()
