"""The backend of a run: whether Transformer Engine computes the layers that it has modules of, or torch does.

The choice becomes part of the plan's environment, by which ranks build their modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from attrs import evolve

from megaloom.dsl import Graph
from megaloom.dsl.errors import UserError
from megaloom.planner.contract.capability import TRANSFORMER_ENGINE, capability
from megaloom.planner.contract.engine_parts import EnginePart, precision_for_engine
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Backend, Precision, Runtime
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.environment import current_environment, engine_is_installed, multiplies_fp8


def with_backend(plan: Plan, backend: Backend) -> Plan:
    """Return the plan with the environment in which a run with this option builds its layers.

    AUTO takes Transformer Engine where it can compute. Raise UserError if TE is asked for where it cannot, or if it
    must not compute where torch cannot.
    """
    precision = plan.workload.precision
    refusal = engine_refusal(precision, plan.layout)
    if precision.narrow and (refusal or backend is Backend.TORCH):
        why = refusal or "torch has no linear layers in fp8, and --backend torch leaves Transformer Engine out"
        raise UserError(f"--precision {precision}: {why}\nuse --precision bf16{'' if refusal else ', or --backend te'}")
    if refusal and backend is Backend.TE:
        raise UserError(f"--backend te: {refusal}\nuse --backend auto or torch")
    used = not refusal and backend is not Backend.TORCH
    others = tuple(name for name in plan.environment.backends if name != TRANSFORMER_ENGINE)
    return evolve(
        plan, environment=evolve(plan.environment, backends=(*others, TRANSFORMER_ENGINE) if used else others)
    )


def engine_refusal(precision: Precision, layout: Layout) -> str:
    """Return why Transformer Engine computes no run of this precision and layout on this machine; empty if it does."""
    if reason := precision_for_engine(precision):
        return reason
    if layout.fsdp:
        return f"Transformer Engine has not been tried with --shard {layout.shard}"
    if not device.gpu_count():
        return "Transformer Engine needs a CUDA device, and this machine has none"
    if not engine_is_installed():
        return "Transformer Engine is not installed"
    if precision.narrow and not multiplies_fp8():
        return f"{current_environment().device} has no products in fp8, which devices have since Hopper and Ada"
    if TRANSFORMER_ENGINE not in current_environment().backends:
        return f"Transformer Engine's fused attention needs a newer device than {current_environment().device}"
    return ""


def precision_note(plan: Plan) -> str:
    """Return a line if an evaluation of a run in fp8 computes in bf16 on this machine; else an empty one."""
    precision = plan.workload.precision
    refusal = engine_refusal(precision, plan.layout) if precision.narrow else ""
    return refusal and f"the run is in {precision}, and this evaluation in {precision.wide}: {refusal}"


def backend_note(plan: Plan, graph: Graph) -> str:
    """Return a line on which parts of a model Transformer Engine computes; empty on a CPU.

    plan: that of a run, with its backend. Of Transformer Engine only products in fp8 have a price of their own: too few
    other runs have been measured.
    """
    if not device.gpu_count():
        return ""
    if TRANSFORMER_ENGINE not in plan.environment.backends:
        return "backend: torch"
    found = set(_parts(plan, graph))
    names = ", ".join(part.value for part in EnginePart if part in found) or "no part of this model"
    priced = "; the plan's step time is that of torch" if found and not plan.workload.precision.narrow else ""
    return f"backend: {TRANSFORMER_ENGINE}{_version()} for {names}; torch for the rest{priced}"


def _parts(plan: Plan, graph: Graph) -> Iterator[EnginePart]:
    found = capability(Runtime.MEGALOOM, plan.environment)
    for node in graph.nodes:
        yield from found.execution(node, plan.layout.split, plan.workload.precision).engine


def _version() -> str:
    try:
        return f" {version('transformer_engine')}"
    except PackageNotFoundError:  # built from source, without metadata
        return ""
