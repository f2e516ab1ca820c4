"""Transitions lead from placement to placement; they depend on which axes have several devices, not on how many."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from megaloom.dsl import Split, graph
from megaloom.dsl.catalog import examples
from megaloom.dsl.facts.placement import NodePlacement, Transitions
from megaloom.dsl.facts.primitives import Program, effective_split, fitted, program
from megaloom.dsl.facts.propagation import _placement, propagate
from tests.support.models.examples import example

SPLITS = [
    Split(tp=tp, cp=cp, ep=2, etp=etp, sequence_parallel=sp)
    for tp, cp, etp, sp in product((1, 4), (1, 4), (1, 4), (False, True))
    if tp > 1 or not sp
]


def comparable(placement: NodePlacement) -> tuple[object, ...]:
    """Return all that a placement says, as values."""
    steps = [(s.step.name, s.reads, s.result, s.sharded_axes, s.statistics_axes) for s in placement.steps]
    partial = {i: step.name for i, step in placement.partial.items()}
    return steps, placement.output, partial, placement.weights_only


@pytest.mark.parametrize("name", examples())
def test_a_placement_is_coherent_and_does_not_depend_on_degrees_above_one(name: str) -> None:
    for split in SPLITS:
        for p in {fitted(program(node), split) for node in graph(example(name)).nodes}:
            placement = propagate(p, split)
            assert comparable(placement) == comparable(directly(p, split))
            for step in placement.steps:
                assert all(map(is_chain, (*step.reads, step.result)))


def is_chain(transitions: Transitions) -> bool:
    """Return whether over each axis each transition begins with the placement in which the one before ends."""
    by_axis = sorted(transitions, key=lambda t: t.axis)
    return all(a.target == b.source for a, b in pairwise(by_axis) if a.axis == b.axis)


def directly(p: Program, split: Split) -> NodePlacement:
    """Return the placement under a split, as computed for these degrees alone."""
    return _placement(p, effective_split(p, split))
