"""Search for the layout of a model on a cluster, and write it as a plan with its reasons.

`plan` is the public function. The search is in branch_and_bound.py; docs/concepts/search.md explains it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_form import fingerprint
from megaloom.dsl.graph import Model, graph
from megaloom.planner.contract.capability import assumed_environment, needs_flex_attention
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.plans import PLAN_VERSION, Plan
from megaloom.planner.contract.workload import Runtime, Workload
from megaloom.planner.cost.profiles.frameworks import PROFILES
from megaloom.planner.model.requirements import model_requirements
from megaloom.planner.partition.memory_limit import HEADROOM
from megaloom.planner.partition.whole_blocks import with_cut_points_of
from megaloom.planner.rules.capabilities import caveats
from megaloom.planner.simulate.price import Priced

from .branch_and_bound import PROVEN_MESHES, SIMULATED, BranchAndBound
from .candidates import Candidates
from .device_meshes import TIE_RATIO
from .found import Found, Progress
from .infeasible import (
    PLAIN_AXES,
    Advice,
    NoLegalLayoutError,
    check_ranges,
    checked_fixed,
    gpus_option,
    nothing_fits,
    nothing_legal,
)
from .neighbours import priced_neighbours
from .pricing import Pricer, price
from .reasons import (
    Rejected,
    best_reasons,
    other_reasons,
    slower_neighbours,
)
from .sharding_gains import sharding_gains
from .simple_first import NEAR_RATIO, best_of_each_mesh, preferred
from .variant_choices import FixedAxes

__all__ = ["Found", "Progress", "Rejected", "plan", "price"]


def plan(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    *,
    ref: str,
    fixed: FixedAxes | None = None,
    headroom: float = HEADROOM,
    runtime: Runtime = Runtime.MEGALOOM,
    on_progress: Callable[[Progress], None] | None = None,
    keep_incumbent: bool = False,
    fastest: bool = False,
    advice: Advice = gpus_option,
) -> Found:
    """Return the simplest of the fastest legal layouts that fit the memory, with runners-up, reasons and neighbours.

    No legal layout that fits is faster than the result by more than 1 %, or 0.1 % with `fastest`, given the planner's
    partition of each. The optimizer's state is distributed unless a step of a mean rank ends earlier without that.
    Gradients are sharded only where balanced stages do not fit with the distributed optimizer, and weights only where
    they do not fit with sharded gradients, because each takes more communication.

    ref: where the model is declared, such as "file.py:name"; the plan records it.
    fixed: fields of the layout that the search must not change, by name, such as {"tp": 4}.
    headroom: share of each device's memory that stays free.
    runtime: the framework that will run the plan, which decides legal layouts and costs.
    on_progress: is called from the first layout that fits, then about ten times a second.
    keep_incumbent: on KeyboardInterrupt, return the best layout so far, if there is one.
    fastest: recommend the fastest layout, also where a simpler one is at most 1 % slower.
    advice: returns the words in which the message says to use another cluster.
    Raises NoLegalLayoutError if no legal layout has the fixed fields, UserError if none fits: with the smallest changes
    that help.
    """
    began = perf_counter()
    chosen = checked_fixed(fixed or {})
    check_ranges(chosen, graph(model), workload, cluster)
    pricer = Pricer(with_cut_points_of(graph(model), runtime), cluster, workload, PROFILES[runtime], headroom)
    solver, candidates, gap = BranchAndBound(on_progress), None, None
    try:
        solver.find_incumbent(Candidates(pricer, {**PLAIN_AXES, **chosen}))
        candidates = Candidates(pricer, chosen)
        if not candidates.count:
            raise NoLegalLayoutError(nothing_legal(pricer, chosen))
        simulated = solver.search(candidates, PROVEN_MESHES, SIMULATED)
    except KeyboardInterrupt:
        if not keep_incumbent or solver.progress is None:
            raise
        candidates, gap = candidates or Candidates(pricer, chosen), solver.progress.gap
        simulated = solver.fastest(SIMULATED)
    if not simulated:
        raise UserError(nothing_fits(pricer, candidates, advice))
    best, *others = best_of_each_mesh(simulated, TIE_RATIO if fastest else NEAR_RATIO)
    shown = {priced.layout for priced in (best, *others)}
    rivals, rejected = priced_neighbours(best.layout, pricer, chosen)
    wins, *rest = best_reasons(best, simulated[0], others, rivals, candidates.count, cluster)
    gains = () if gap is not None else sharding_gains(best, simulated, solver.examined, pricer, chosen)
    identity, experts = fingerprint(model), model_requirements(graph(model)).experts
    flex = needs_flex_attention(graph(model).nodes)
    environment = assumed_environment(runtime, cluster.device.name, experts, flex, workload.precision)

    def plan_of(priced: Priced, reasons: tuple[str, ...]) -> Plan:
        own = runtime is Runtime.MEGALOOM
        warnings = caveats(priced.layout, graph(model), workload, cluster) if own else ()
        return Plan(
            version=PLAN_VERSION,
            model=ref,
            fingerprint=identity,
            environment=environment,
            cluster=cluster,
            workload=workload,
            layout=priced.layout,
            stages=priced.stages,
            predicted=priced.prediction,
            reasons=(*reasons, *warnings),
            runtime=runtime,
            lora=model.lora,
        )

    first = plan_of(best, (wins, *gains, *rest))
    quickest, simple = (
        first if one is best else plan_of(one, other_reasons(one, best))
        for one in (preferred(simulated, ratio) for ratio in (TIE_RATIO, NEAR_RATIO))
    )
    return Found(
        best=first,
        fastest=quickest,
        recommended=simple,
        others=tuple(plan_of(other, other_reasons(other, best)) for other in others),
        variants=tuple(plan_of(other, other_reasons(other, best)) for other in simulated if other.layout not in shown),
        rejected=rejected,
        slower=slower_neighbours(best, rivals),
        seconds=perf_counter() - began,
        gap=gap,
    )
