"""Verification: a plan computes what one process computes.

`compare` trains a few steps under the plan and in one process, from one seed and on the same tokens. Only the layout
differs. The command `megaloom verify` and the parity tests use it.
"""

from __future__ import annotations

import torch
from attrs import evolve, frozen

from megaloom.dsl import Attend, Drop, Split
from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model, graph, primitives
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.module_kinds import runs_as_module
from megaloom.planner.contract.plans import Plan, Stage
from megaloom.planner.contract.workload import Precision
from megaloom.planner.rules.plan_check import check_plan, check_trainable
from megaloom.runtime.engine.recipe import Recipe
from megaloom.runtime.engine.samples import Sample, SampleMaker
from megaloom.runtime.launch import launcher
from megaloom.runtime.megatron import device
from megaloom.runtime.reference.dropout import dropout_rate


@frozen
class Curve:
    """Loss and gradient norm of each step of a short run."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]


@frozen
class Comparison:
    """Two short runs and the tolerance for their difference: absolute for losses, relative for gradient norms."""

    planned: Curve
    reference: Curve
    tolerance: float

    @property
    def loss_error(self) -> float:
        """Return the largest difference between two losses, in nats per token."""
        return max(abs(a - b) for a, b in zip(self.planned.losses, self.reference.losses, strict=True))

    @property
    def norm_error(self) -> float:
        """Return the largest difference between two gradient norms, divided by max(1, reference norm)."""
        pairs = zip(self.planned.grad_norms, self.reference.grad_norms, strict=True)
        return max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)

    @property
    def agrees(self) -> bool:
        """Return whether losses and norms are within the tolerance. NaN never is."""
        return self.loss_error <= self.tolerance and self.norm_error <= self.tolerance


def tolerance(precision: Precision) -> float:
    """Return the largest difference that rounding alone causes between two layouts in 3 steps, on this device."""
    if precision is not Precision.FP32:
        return 1e-2  # sums of 8-bit mantissas in another order; up to 3e-3 measured on H200s at TP2 x PP2
    return 1e-4 if device.gpu_count() else 1e-5


def compare(
    plan: Plan,
    *,
    reference: Plan | None = None,
    steps: int = 3,
    seed: int = 1234,
    within: float | None = None,
    timeout: float | None = None,
) -> Comparison:
    """Train a few steps under a plan and under a reference plan, by default one process with the same micro-batches.

    Raise UserError for a model with dropout whose masks depend on the layout, unless a reference is given.
    """
    model, _ = find(plan.model)
    check_plan(plan, model)
    check_trainable(plan, model)
    if steps < 1:
        raise UserError(f"--steps must be at least 1, got {steps}")
    if reference is None and plan.layout.world > 1 and (node := first_layout_dropout(model, plan.layout)):
        raise UserError(
            f"cannot verify a model with dropout in fused attention or in experts ({node}): its masks depend on the "
            "layout\nset this dropout to 0 and verify that model; other dropout has equal masks under every layout"
        )
    planned, expected = (
        launcher.run(short_run, (p, steps, seed), p.layout.world, timeout=timeout)[0]
        for p in (plan, reference or single_process(plan, model))
    )
    return Comparison(planned, expected, tolerance(plan.workload.precision) if within is None else within)


def single_process(plan: Plan, model: Model) -> Plan:
    """Return the plan of one process with the micro-batches of `plan` and a single stage."""
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


def first_layout_dropout(model: Model, layout: Layout) -> str | None:
    """Return the name of the first node with dropout whose masks depend on the layout; None if there is none.

    These are the dropout of fused attention, and that of the copies of a layer, such as experts.
    """
    splits = layout.split, Split()
    for node in graph(model).nodes:
        for v, _, outer in primitives(node.value):
            if isinstance(v.op, Drop | Attend) and outer and dropout_rate(v.op):
                return node.name
            if isinstance(v.op, Attend) and v.op.dropout and any(runs_as_module(node, split) for split in splits):
                return node.name
    return None


def short_run(plan: Plan, steps: int, seed: int) -> Curve:
    """Train the plan's model for a few steps on this rank, on random tokens that do not depend on the layout."""
    from megaloom.runtime.engine.engine import (
        Engine,  # imports megatron-core, which the process that only starts ranks does not need
    )

    model, _ = find(plan.model)
    size = plan.workload.batch
    engine = Engine.build(plan, model, Recipe(steps=max(steps, 10), seed=seed, warmup=0))

    maker = SampleMaker.of(engine.graph, plan.workload.seq)
    vocab = maker.ids

    def sample(i: int) -> Sample:
        generator = torch.Generator().manual_seed(seed + i)
        text = torch.randint(vocab, (maker.length,), generator=generator)
        return engine.steps.data_step(maker, text, i, seed)

    results = [engine.step(lambda i, first=k * size: sample(first + i)) for k in range(steps)]  # type: ignore[misc]
    return Curve(tuple(r.loss for r in results), tuple(r.grad_norm for r in results))
