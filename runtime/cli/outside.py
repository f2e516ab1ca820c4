"""One line on why the steps of a run took longer or shorter than the 90 % interval of its plan."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import exp

from attrs import evolve

from megaloom.planner.contract.plans import Plan
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.runtime.launch.rank_environment import threads_per_rank
from megaloom.runtime.megatron.environment import current_environment
from megaloom.runtime.megatron.host import usable_cores
from megaloom.runtime.training.training_run import Summary

from .machine import BUSY_LOAD, given_machine, kept

FEWEST_STEPS = 10  # of which the median is compared
LOAD_SECONDS = 60.0  # over which the load average decays


def outside_text(plan: Plan, summary: Summary, busy: str) -> str:
    """Return a line on a run whose median step lies outside the interval of its plan; "" for one inside.

    busy: the load of other programs before the run, as text; "" if there was little.
    """
    seconds, (low, high) = summary.step_seconds, plan.predicted.interval
    if seconds is None or summary.step - (summary.resumed or 0) < FEWEST_STEPS or low <= seconds <= high:
        return ""
    what = f"{'slower' if seconds > high else 'faster'} than the 90% interval of the plan, {low:.3f} to {high:.3f} s"
    reasons = list(_reasons(plan, busy or _load_of_others(plan, summary.seconds), slower=seconds > high))
    return f"{what}: {', and '.join(reasons)}" if reasons else f"{what}; --profile and `megaloom compare` show where"


def _reasons(plan: Plan, busy: str, *, slower: bool) -> Iterator[str]:
    here, world = current_environment().device, plan.layout.world
    if plan.cluster.device.name != here:
        yield f"the plan is for {plan.cluster}, and this machine has {here}"
        return
    if here != "CPU":
        return
    known = kept(world, plan.workload.precision)
    if plan.cluster == cluster(f"{world}xCPU"):
        yield f"the plan has the figures of the preset {plan.cluster}, " + _measures()
    elif known is not None and evolve(plan.cluster, source="") != known:
        yield "the plan was made with other figures than those measured on this machine, " + _measures()
    if slower and world > (cores := usable_cores()):
        yield f"{world} processes share {cores} {'cores' if cores > 1 else 'core'}"
    if slower and busy:
        yield f"other programs are running ({busy})"


def _measures() -> str:
    """Return what to do for figures of this machine."""
    if given := given_machine():
        return f"which MEGALOOM_MACHINE={given} gives"
    return "and `megaloom train MODEL` without a plan measures this machine"


def _load_of_others(plan: Plan, seconds: float) -> str:
    """Return the load of other programs after a run, as text: the load average without the run's share of it."""
    cores, own = usable_cores(), plan.layout.world * threads_per_rank(plan.layout.world)
    load = os.getloadavg()[0]
    others = load - own * (1 - exp(-seconds / LOAD_SECONDS))
    return f"load {load:.1f} on {cores} {'cores' if cores > 1 else 'core'}" if others > BUSY_LOAD * cores else ""
