"""Comparison of the rules with megatron-core on random layouts."""

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
from tests.support.legality.megatron import Refusal, refusal
from tests.support.legality.random_cases import Case, declared, drawn


@frozen
class Verdict:
    """A case with the refusal of megatron-core and the broken rules, by owner."""

    case: Case
    refusal: Refusal | None
    theirs: tuple[str, ...]  # broken rules of megatron-core and of its callers
    stricter: tuple[str, ...]  # broken rules of the planner and of the runtime

    @property
    def agrees(self) -> bool:
        """True if rules and megatron-core agree, and a broken rule names the line at which megatron-core raises."""
        if self.refusal is None:
            return not self.theirs
        return any(self.refusal.where in SOURCES[rule] for rule in self.theirs)


def _source_lines(source: str) -> set[str]:
    """Return the lines that a rule cites: `utils.py:2025; mappings.py:68 and 172` are three. Other text stays whole."""
    parts = (part.partition(":") for part in source.split("; "))
    return {f"{file}{colon}{line}" for file, colon, lines in parts for line in re.findall(r"\d+", lines) or [""]}


NODE = 8  # devices of a node, if 8 divides the number of devices
# Our runtime has no such limits.
CORE_ALONE = frozenset(rule.id for rule in EXPORT_RULES if rule.owner in (Owner.CORE, Owner.CALLERS))
SOURCES = {
    rule.id: _source_lines(rule.source) for rule in (*RULES, *EXPORT_RULES) if rule in RULES or rule.id in CORE_ALONE
}
OURS = frozenset(rule.id for rule in RULES if rule.owner in (Owner.PLANNER, Owner.RUNTIME))


def compared(case: Case) -> Verdict:
    """Return the verdict on a case."""
    machine = evolve(cluster("1xH100"), count=case.world, per_node=gcd(NODE, case.world))
    given = case.layout, declared(case.decoder), case.workload, machine
    broken = tuple(v.rule for v in violations(*given)) + tuple(
        v.rule for v in export_violations(*given) if v.rule in CORE_ALONE
    )
    theirs, stricter = (tuple(r for r in broken if (r in OURS) is ours) for ours in (False, True))
    return Verdict(case, refusal(case), theirs, stricter)


def judged(count: int, seed: int) -> list[Verdict]:
    """Return the verdicts on `count` random cases. Call it in a new process, since it initialises torch.distributed."""
    device.prepare()
    if dist.is_initialized():
        dist.destroy_process_group()
    return [compared(case) for case in drawn(count, seed)]
