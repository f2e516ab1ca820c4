"""Steps of a plan on random tokens, and their seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from megaloom.dsl.catalog import find
from megaloom.planner import Plan
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.samples.samples import SampleMaker


def stepper(plan: Plan, steps: int) -> Callable[[], object]:
    """Build a plan's model on this rank. Return a function that trains one of so many steps."""
    from megaloom.runtime.engine.engine import Engine  # imports megatron-core, which the launcher prepares

    engine = Engine.build(plan, find(plan.model)[0], Recipe(steps=steps))
    maker = SampleMaker.of(engine.graph, plan.workload.seq)
    tokens = torch.randint(maker.ids, (maker.length,), generator=torch.Generator().manual_seed(1))
    return lambda: engine.step(lambda i: maker.make(tokens, i, 1))


def timed_steps(plan: Plan, steps: int) -> Iterator[float]:
    """Build a plan's model on this rank, and yield the seconds of each of its first steps."""
    step = stepper(plan, steps)
    for _ in range(steps):
        begun = time.perf_counter()
        step()
        yield time.perf_counter() - begun
