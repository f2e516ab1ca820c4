"""Recompute regions of a body: primitives of one recompute module, with the values that enter and leave them.

`recompute_regions(program, modules)` returns the region of each recomputed primitive, by the identity of its value.
`body_module` runs a region as one function whose saved activations are its inputs.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from megaloom.dsl import Value, Weight
from megaloom.dsl.facts.primitives import Program, Step, origin
from megaloom.dsl.facts.recompute import modules_of_node, modules_of_ops
from megaloom.planner.contract.choices import DEFAULT_MODULES, Module

OUTPUT_SAVED = (Module.SHARED_EXPERTS,)
"""Modules whose output is not freed: the primitives that read it do not save it."""


@frozen(eq=False)
class RecomputeRegion:
    """Primitives that are recomputed together. Weights are not among the inputs: the caller provides them."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    output_saved: bool


def recompute_regions(program: Program, modules: Iterable[Module]) -> dict[int, RecomputeRegion]:
    """Return the region of each primitive that these modules recompute, by the identity of the primitive's value.

    A module that covers the whole node has no region: `megatron.recompute` recomputes the node. Nor has the core of
    attention, which is always recomputed.
    """
    modules_by_op = modules_of_ops(program)
    regions: dict[int, RecomputeRegion] = {}
    for module in modules:
        if module in DEFAULT_MODULES or module in modules_of_node(program):
            continue
        covered = [s for s in program.steps if module in modules_by_op[id(s.value)]]
        ids = {id(s.value) for s in covered if not isinstance(s.value.op, Weight)}
        for steps in _rounds(program, ids):
            region = _region(program, steps, module in OUTPUT_SAVED)
            if region.inputs:  # values made of weights alone are saved: a checkpoint without inputs has no gradient
                regions |= {id(s.value): region for s in steps}
    return regions


def _rounds(program: Program, recomputed: set[int]) -> list[list[Step]]:
    """Return the recomputed primitives in rounds.

    All inputs of a round from outside the recomputed primitives depend on earlier rounds only, so that each round can
    run at once.
    """
    round_of: dict[int, int] = {}
    rounds: dict[int, list[Step]] = {}
    for s in program.steps:
        inside = id(s.value) in recomputed
        earliest = (round_of.get(id(a.source), 0) + (not inside and id(a.source) in recomputed) for a in s.value.args)
        round_of[id(s.value)] = max(earliest, default=0)
        if inside:
            rounds.setdefault(round_of[id(s.value)], []).append(s)
    return list(rounds.values())


def _region(program: Program, steps: list[Step], output_saved: bool) -> RecomputeRegion:
    """Return the region of these primitives, with the values that they read and that others read of them."""
    inside, node_inputs = {id(s.value) for s in steps}, {id(v) for v in program.inputs}
    outside_args = (a for s in steps for a in s.value.args if id(a.source) not in inside)
    read = (a if id(a) in node_inputs else origin(a) for a in outside_args)
    inputs = {id(v): v for v in read if not isinstance(v.op, Weight)}
    read_outside = {id(a.source) for s in program.steps if id(s.value) not in inside for a in s.value.args}
    outputs = tuple(s.value for s in steps if id(s.value) in read_outside)
    return RecomputeRegion(tuple(inputs.values()), outputs, output_saved)
