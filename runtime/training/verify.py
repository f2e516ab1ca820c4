"""A plan computes what one process computes: the project's honesty check, shown by running both.

`compare` is the whole of it, for the command and for the tests. Both sides start from the same seed and see the same
tokens; what differs is the layout alone.
"""

from __future__ import annotations

import torch
from attrs import evolve, frozen

from megaloom.dsl import Attend, Drop
from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import (
    Model,
    graph,
    primitives,
    vocabulary,
)
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan, Stage
from megaloom.planner.contract.workload import Precision
from megaloom.planner.rules.plan_check import check_plan
from megaloom.runtime.launch import launcher
from megaloom.runtime.megatron import device

from .recipe import Recipe


@frozen
class Curve:
    """What a run of a few optimizer steps gave."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]


@frozen
class Comparison:
    """Two curves, and by how much they may differ: losses absolutely, gradient norms by their own size."""

    planned: Curve
    reference: Curve
    tolerance: float

    @property
    def loss_error(self) -> float:
        """The largest difference between two losses, nats."""
        return max(abs(a - b) for a, b in zip(self.planned.losses, self.reference.losses, strict=True))

    @property
    def norm_error(self) -> float:
        """The largest difference between two gradient norms, as a share of the norm where that is above 1."""
        pairs = zip(self.planned.grad_norms, self.reference.grad_norms, strict=True)
        return max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)

    @property
    def passed(self) -> bool:
        """Whether both are within the tolerance; nothing passes that is not a number."""
        return self.loss_error <= self.tolerance and self.norm_error <= self.tolerance


def tolerance(precision: Precision) -> float:
    """How far rounding alone may part two layouts in 3 steps, on this machine's devices."""
    if precision is Precision.BF16:
        return 1e-2  # sums of 8-bit mantissas in another order: up to 3e-3 was measured on H200s, at TP2 x PP2
    return 1e-4 if device.gpus() else 1e-5


def compare(
    plan: Plan,
    *,
    reference: Plan | None = None,
    steps: int = 3,
    seed: int = 1234,
    within: float | None = None,
    timeout: float | None = None,
) -> Comparison:
    """The curves of a plan and of a reference, by default the same micro-batches in one process.

    UserError for a model that draws dropout, where layouts must differ, unless a reference of the same layout is given.
    """
    model, _ = find(plan.model)
    check_plan(plan, model)
    if steps < 1:
        raise UserError(f"{steps} steps compare nothing: give at least 1")
    if reference is None and plan.layout.world > 1 and (drawn := dropout(model)):
        raise UserError(
            f"{drawn} draws at random, and differently on each layout: there is nothing to compare\n"
            "verify the model without dropout"
        )
    ours, theirs = (
        launcher.run(curve, (p, steps, seed), p.layout.world, timeout=timeout)[0]
        for p in (plan, reference or single(plan, model))
    )
    return Comparison(ours, theirs, tolerance(plan.workload.precision) if within is None else within)


def single(plan: Plan, model: Model) -> Plan:
    """The plan of one process that computes the same: the same micro-batches, one stage."""
    whole = Stage(
        rank=0,
        chunk=0,
        start=0,
        stop=len(graph(model).nodes),
        forward_seconds=sum(s.forward_seconds for s in plan.stages),
        backward_seconds=sum(s.backward_seconds for s in plan.stages),
        params=0,
    )
    return evolve(plan, layout=Layout(micro_batch=plan.layout.micro_batch), stages=(whole,))


def dropout(model: Model) -> str | None:
    """The first node that draws at random, if there is one."""
    for node in graph(model).nodes:
        for v, *_ in primitives(node.value):
            if (isinstance(v.op, Drop) and v.op.rate) or (isinstance(v.op, Attend) and v.op.dropout):
                return node.name
    return None


def curve(plan: Plan, steps: int, seed: int) -> Curve:
    """On each rank: train the plan's model on random tokens, the same for every layout."""
    from .engine import Engine

    model, _ = find(plan.model)
    vocab, size = vocabulary(model), plan.workload.batch
    engine = Engine.build(plan, model, Recipe(steps=max(steps, 10), seed=seed, warmup=0))

    def sample(i: int) -> torch.Tensor:
        source = torch.Generator().manual_seed(seed + i)
        return torch.randint(vocab, (plan.workload.seq + 1,), generator=source)

    results = [engine.step(lambda i, first=k * size: sample(first + i)) for k in range(steps)]  # type: ignore[misc]
    return Curve(tuple(r.loss for r in results), tuple(r.grad_norm for r in results))
