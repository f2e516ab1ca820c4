"""The parts of a body that the backward pass computes again: primitives of one module, with what enters and leaves.

Protocol: `parts(program, modules)` has the part of each primitive that is in one, by the identity of its value.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from megaloom.dsl import Value, Weight
from megaloom.dsl.facts.primitives import Program, Step, origin
from megaloom.dsl.facts.recompute import modules_of_node, modules_of_ops
from megaloom.planner.contract.choices import DEFAULT_MODULES, Module

KEPT = (Module.SHARED_EXPERTS,)  # whose output is kept: nothing that reads it keeps it, so that it need not be freed


@frozen(eq=False)
class Part:
    """Primitives that are computed again together. No weights enter: who runs them has those."""

    enters: tuple[Value, ...]
    leaves: tuple[Value, ...]
    kept: bool


def parts(program: Program, modules: Iterable[Module]) -> dict[int, Part]:
    """The parts that these modules are of a node, unless they are all of it. The core of attention is none."""
    of = modules_of_ops(program)
    out: dict[int, Part] = {}
    for module in modules:
        if module in DEFAULT_MODULES or module in modules_of_node(program):
            continue
        steps = [s for s in program.steps if module in of[id(s.value)] and not isinstance(s.value.op, Weight)]
        for together in _rounds(program, {id(s.value) for s in steps}):
            part = _part(program, together, module in KEPT)
            if part.enters:  # what is made of weights alone is kept: no gradient would reach them
                out |= {id(s.value): part for s in together}
    return out


def _rounds(program: Program, own: set[int]) -> list[list[Step]]:
    """These primitives in rounds: what one round reads of others is computed from the rounds before it alone."""
    turn: dict[int, int] = {}
    rounds: dict[int, list[Step]] = {}
    for s in program.steps:
        mine = id(s.value) in own
        before = (turn.get(id(a.source), 0) + (not mine and id(a.source) in own) for a in s.value.args)
        turn[id(s.value)] = max(before, default=0)
        if mine:
            rounds.setdefault(turn[id(s.value)], []).append(s)
    return list(rounds.values())


def _part(program: Program, steps: list[Step], kept: bool) -> Part:
    own, given = {id(s.value) for s in steps}, {id(v) for v in program.inputs}
    others = (a for s in steps for a in s.value.args if id(a.source) not in own)
    read = (a if id(a) in given else origin(a) for a in others)
    enters = {id(v): v for v in read if not isinstance(v.op, Weight)}
    outside = [a for s in program.steps if id(s.value) not in own for a in s.value.args]
    needed = {id(a.source) for a in outside}
    return Part(tuple(enters.values()), tuple(s.value for s in steps if id(s.value) in needed), kept)
