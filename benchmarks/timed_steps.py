"""Steps of a plan on random tokens, and their seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from megaloom.dsl.catalog import find
from megaloom.planner import Plan
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.samples.samples import SampleMaker


def stepper(plan: Plan, steps: int, *, balanced: bool = False) -> Callable[[], object]:
    """Build a plan's model on this rank. Return a function that trains one of so many steps.

    balanced: routers choose experts at random, so that all get about as many tokens, as plans assume. A router with
    its initial weights gives some experts far more tokens than others, and ranks wait for the busiest.
    """
    from megaloom.runtime.engine.engine import Engine  # imports megatron-core, which the launcher prepares

    engine = Engine.build(plan, find(plan.model)[0], Recipe(steps=steps))
    for router in _routers(engine.model_chunks) if balanced else ():
        router.config.moe_router_force_load_balancing = True
    maker = SampleMaker.of(engine.graph, plan.workload.seq)
    tokens = torch.randint(maker.ids, (maker.length,), generator=torch.Generator().manual_seed(1))
    return lambda: engine.step(lambda i: maker.make(tokens, i, 1))


def _routers(chunks: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the routers of megatron-core."""
    from megatron.core.transformer.moe.router import TopKRouter

    yield from (m for chunk in chunks for m in chunk.modules() if isinstance(m, TopKRouter))


def timed_steps(plan: Plan, steps: int, *, balanced: bool = False) -> Iterator[float]:
    """Build a plan's model on this rank, and yield the seconds of each of its first steps. balanced: see `stepper`."""
    step = stepper(plan, steps, balanced=balanced)
    for _ in range(steps):
        begun = time.perf_counter()
        step()
        yield time.perf_counter() - begun
