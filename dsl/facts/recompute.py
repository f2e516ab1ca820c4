"""Activation recomputation: the modes, the modules of selective recompute, and the modules of each primitive.

Names of modules are those of megatron-core (0.16.1, transformer_config.py:411-425). The activations of a recomputed
module are not saved, but its inputs are. A norm in front of layers is a module by its place in the graph, which
`megaloom.dsl.facts.saved` knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from megaloom.dsl.choices import Choice, Member
from megaloom.dsl.errors import UserError, did_you_mean
from megaloom.dsl.layers.latent_attention import MLA
from megaloom.dsl.ops.attention_core import Attend
from megaloom.dsl.ops.dot import Dot
from megaloom.dsl.ops.norm import Normalize
from megaloom.dsl.ops.routing import Route
from megaloom.dsl.ops.sequence import Conv, Scan

from .primitives import Program, Step


class Recompute(Choice):
    """Activations that the backward pass recomputes. Source: Korthikanti et al., arXiv:2205.05198."""

    NONE = 0
    SELECTIVE = 1  # those of some modules of each block
    FULL = 2  # all but the inputs of each block (an iteration of a repeat)


class Module(Member):
    """Part of a block that selective recompute can name."""

    CORE_ATTN = "core_attn"  # the core of attention; its output is saved
    LAYERNORM = "layernorm"  # the norms in front of the layers of a block
    MLA_UP_PROJ = "mla_up_proj"  # queries, keys and values from the compressed vectors of latent attention
    MLP = "mlp"  # feed-forward layers
    MOE_ACT = "moe_act"  # the activation functions of experts
    SHARED_EXPERTS = "shared_experts"  # the experts that every token goes to
    MOE = "moe"  # mixtures of experts: experts, shared experts, their collectives


CORE: tuple[Module, ...] = (Module.CORE_ATTN,)  # the modules that selective recompute has by default
HEADS = ("heads", "kv_heads")
RecomputedBy = frozenset[Module]  # of an op: any of these modules recomputes it
NO_MODULES: RecomputedBy = frozenset()


def recompute_mode(name: str | Recompute) -> Recompute:
    """Return the recompute mode of this name. Raises UserError for an unknown one."""
    known = [str(mode) for mode in Recompute]
    if str(name) not in known:
        raise UserError(f"no recompute {name!r}{did_you_mean(name, known)}there are {', '.join(known)}")
    return Recompute[str(name).upper()]


def ordered_modules(names: Iterable[str]) -> tuple[Module, ...]:
    """Return the modules of these names in their order, each once. Raises UserError for an unknown name."""
    given = (names,) if isinstance(names, str) else tuple(names)
    for name in given:
        if name not in list(Module):
            near, known = did_you_mean(name, list(Module)), ", ".join(Module)
            raise UserError(f"no module {name!r} to recompute{near}there are {known}")
    return tuple(m for m in Module if m in given)


@lru_cache(maxsize=1 << 12)
def modules_of_ops(p: Program) -> Mapping[int, RecomputedBy]:
    """Return the modules that recompute each primitive of a node, by the identity of its value."""
    out: dict[int, set[Module]] = {id(step.value): set() for step in p.steps}
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
    return isinstance(p.value.source.op, Normalize) and len(p.inputs) == 1


def _parts(p: Program) -> Iterator[tuple[Module, Iterable[Step]]]:
    ops = [step.value.op for step in p.steps]
    if any(isinstance(op, Route) for op in ops):
        yield Module.MOE, p.steps
        yield Module.MOE_ACT, _expert_activations(p)
        yield Module.SHARED_EXPERTS, (s for s in p.steps if s.name.startswith("shared."))
        return
    cores = [step for step in p.steps if isinstance(step.value.op, Attend)]
    yield Module.CORE_ATTN, cores
    if isinstance(p.value.op, MLA):  # values with heads; the rotary keys that enter are small, and not counted
        yield Module.MLA_UP_PROJ, (s for s in p.steps if s not in cores and any(d in s.value.shape for d in HEADS))
    if sum(isinstance(op, Dot) for op in ops) > 1 and not any(isinstance(op, Attend | Scan | Conv) for op in ops):
        yield Module.MLP, p.steps


def _expert_activations(p: Program) -> Iterator[Step]:
    """Yield the elementwise ops of experts whose result a matrix product of the experts reads."""
    steps = {id(step.value): step for step in p.steps if step.outer}
    todo = [a for step in steps.values() if isinstance(step.value.op, Dot) for a in step.value.args]
    while todo:
        step = steps.pop(id(todo.pop().source), None)
        if step is not None:
            todo += step.value.args
            if step.value.op.elementwise:
                yield step
