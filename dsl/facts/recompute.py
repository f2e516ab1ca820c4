"""Activation recomputation: the modes, the modules of selective recompute, and the modules of each primitive.

Names of modules are those of megatron-core (0.16.1, transformer_config.py:411-425). The activations of a recomputed
module are not saved, but its inputs are. A norm in front of layers is a module by its place in the graph, which
`megaloom.dsl.facts.saved` knows. The fields of a layout enumerate these names in `planner.contract.choices`, which
loads without the dsl so that command lines start at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Literal, get_args

from megaloom.dsl.errors import UserError, did_you_mean
from megaloom.dsl.layers.latent_attention import MLA
from megaloom.dsl.work_kinds import WorkKind

from .primitives import Program, Step

RecomputeMode = Literal["none", "selective", "full"]
"""Activations that the backward pass recomputes. Source: Korthikanti et al., arXiv:2205.05198.

selective: those of some modules of each block. full: all but the inputs of each block (an iteration of a repeat).
"""

RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts", "moe"]
"""Part of a block that selective recompute can name.

core_attn: the core of attention; its output is saved. layernorm: the norms in front of the layers of a block.
mla_up_proj: queries, keys and values from the compressed vectors of latent attention. mlp: feed-forward layers.
moe_act: the activation functions of experts. shared_experts: the experts that every token goes to. moe: mixtures of
experts: experts, shared experts, their collectives.
"""

RECOMPUTE_MODES: tuple[RecomputeMode, ...] = get_args(RecomputeMode)
RECOMPUTE_MODULES: tuple[RecomputeModule, ...] = get_args(RecomputeModule)

CORE: tuple[RecomputeModule, ...] = ("core_attn",)  # the modules that selective recompute has by default
HEADS = ("heads", "kv_heads")
RecomputedBy = frozenset[str]  # of an op: any of these modules recomputes it
NO_MODULES: RecomputedBy = frozenset()


def recompute_mode(name: str) -> RecomputeMode:
    """Return the recompute mode of this name. Raises UserError for an unknown one."""
    for mode in RECOMPUTE_MODES:
        if mode == name:
            return mode
    near, known = did_you_mean(name, RECOMPUTE_MODES), ", ".join(RECOMPUTE_MODES)
    raise UserError(f"no recompute mode {name!r}{near}modes are {known}")


def ordered_modules(names: Iterable[str]) -> tuple[RecomputeModule, ...]:
    """Return the modules of these names in their order, each once. Raises UserError for an unknown name."""
    given = (names,) if isinstance(names, str) else tuple(names)
    for name in given:
        if name not in RECOMPUTE_MODULES:
            near, known = did_you_mean(name, RECOMPUTE_MODULES), ", ".join(RECOMPUTE_MODULES)
            raise UserError(f"no module {name!r} to recompute{near}modules are {known}")
    return tuple(m for m in RECOMPUTE_MODULES if m in given)


@lru_cache(maxsize=1 << 12)
def modules_of_ops(p: Program) -> Mapping[int, RecomputedBy]:
    """Return the modules that recompute each primitive of a node, by the identity of its value."""
    out: dict[int, set[RecomputeModule]] = {id(step.value): set() for step in p.steps}
    for module, steps in _parts(p):
        for step in steps:
            out[id(step.value)].add(module)
    return {i: frozenset(modules) for i, modules in out.items()}


@lru_cache(maxsize=1 << 12)
def modules_of_node(p: Program) -> RecomputedBy:
    """Return the modules that recompute a whole node."""
    return frozenset.intersection(*modules_of_ops(p).values()) if p.steps else NO_MODULES


def is_norm(p: Program) -> bool:
    """Return whether a node is a norm of its only input."""
    return p.value.source.op.work_kind is WorkKind.NORM and len(p.inputs) == 1


def _parts(p: Program) -> Iterator[tuple[RecomputeModule, Iterable[Step]]]:
    kinds = [step.value.op.work_kind for step in p.steps]
    if WorkKind.DISPATCH in kinds:
        yield "moe", p.steps
        yield "moe_act", _expert_activations(p)
        yield "shared_experts", (s for s in p.steps if s.name.startswith("shared."))
        return
    cores = [step for step in p.steps if step.value.op.work_kind is WorkKind.ATTENTION]
    yield "core_attn", cores
    if isinstance(p.value.op, MLA):  # values with heads; the rotary keys that enter are small, and not counted
        yield "mla_up_proj", (s for s in p.steps if s not in cores and any(d in s.value.shape for d in HEADS))
    if kinds.count(WorkKind.PRODUCT) > 1 and not any(kind.is_core for kind in kinds):
        yield "mlp", p.steps


def _expert_activations(p: Program) -> Iterator[Step]:
    """Yield the elementwise ops of experts whose result a matrix product of the experts reads."""
    steps = {id(step.value): step for step in p.steps if step.outer}
    todo = [a for step in steps.values() if step.value.op.work_kind is WorkKind.PRODUCT for a in step.value.args]
    while todo:
        step = steps.pop(id(todo.pop().source), None)
        if step is not None:
            todo += step.value.args
            if step.value.op.elementwise:
                yield step
