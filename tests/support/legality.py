"""The rules beside megatron-core: what both say of drawn layouts."""

from __future__ import annotations

import re
from math import gcd

import torch.distributed as dist
from attrs import evolve, frozen

from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.rules.export_rules import EXPORT_RULES, export_violations
from megaloom.planner.rules.rule import Owner
from megaloom.planner.rules.rules import RULES, violations
from megaloom.runtime.megatron import device
from tests.support.drawn import Case, declared, drawn
from tests.support.megatron import Refusal, refusal


@frozen
class Verdict:
    """What both say of a case: the rules by whom they are."""

    case: Case
    refusal: Refusal | None
    theirs: tuple[str, ...]  # rules of megatron-core and of its callers that are broken
    stricter: tuple[str, ...]  # those of the planner and of the runtime

    @property
    def agrees(self) -> bool:
        """Whether the rules that are megatron-core's say what it says, and one of them where it does."""
        if self.refusal is None:
            return not self.theirs
        return any(self.refusal.where in SOURCES[rule] for rule in self.theirs)


def _places(source: str) -> set[str]:
    """`utils.py:2025; mappings.py:68 and 172` as the three places, what is no place as it is."""
    parts = (part.partition(":") for part in source.split("; "))
    return {f"{file}{colon}{line}" for file, colon, lines in parts for line in re.findall(r"\d+", lines) or [""]}


NODE = 8  # devices, if they divide those there are
CORE_ALONE = frozenset(
    rule.id for rule in EXPORT_RULES if rule.owner is Owner.CORE
)  # our runtime takes what they refuse
SOURCES = {rule.id: _places(rule.source) for rule in (*RULES, *EXPORT_RULES) if rule in RULES or rule.id in CORE_ALONE}
OURS = frozenset(rule.id for rule in RULES if rule.owner in (Owner.PLANNER, Owner.RUNTIME))


def compared(case: Case) -> Verdict:
    """A case as both see it."""
    machine = evolve(cluster("1xH100"), count=case.world, per_node=gcd(NODE, case.world))
    given = case.layout, declared(case.decoder), case.workload, machine
    broken = tuple(v.rule for v in violations(*given)) + tuple(
        v.rule for v in export_violations(*given) if v.rule in CORE_ALONE
    )
    theirs, stricter = (tuple(r for r in broken if (r in OURS) is ours) for ours in (False, True))
    return Verdict(case, refusal(case), theirs, stricter)


def judged(count: int, seed: int) -> list[Verdict]:
    """Drawn cases, each as both see it. To be run in a process of its own."""
    device.prepare()
    if dist.is_initialized():
        dist.destroy_process_group()
    return [compared(case) for case in drawn(count, seed)]
