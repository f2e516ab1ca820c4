"""The parts of a block that the backward pass may compute again one by one, by the names that megatron-core gives them.

Protocol: `again(program)` says which of these modules compute each primitive of a node again, `MODULES` what each is.
What is computed again is not kept, but what enters it is. A norm before a layer is one by its place in the graph, which
`keep` knows. Source: megatron-core 0.16.1, transformer_config.py:411-425.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Literal, get_args

from megaloom.dsl.errors import UserError, did_you_mean
from megaloom.dsl.layers.latent_attention import MLA
from megaloom.dsl.ops.attention_core import Attend
from megaloom.dsl.ops.dot import Dot
from megaloom.dsl.ops.norm import Normalize
from megaloom.dsl.ops.routing import Route
from megaloom.dsl.ops.sequence import Conv, Scan

from .primitives import Program, Step

Module = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts", "moe"]
MODULES: dict[Module, str] = {
    "core_attn": "the core of attention; its output is kept",
    "layernorm": "the norms before the layers of a block",
    "mla_up_proj": "what makes queries, keys and values of latent attention's short vectors",
    "mlp": "the feed-forward layers",
    "moe_act": "the experts' activations",
    "shared_experts": "the experts that every token goes to",
    "moe": "the layers of experts, with those and their exchanges",
}
CORE: tuple[Module, ...] = ("core_attn",)
HEADS = ("heads", "kv_heads")
Again = frozenset[Module]
NONE: Again = frozenset()


def modules(names: Iterable[str]) -> tuple[Module, ...]:
    """These modules in their order, each once. Raises UserError for an unknown name."""
    given = (names,) if isinstance(names, str) else tuple(names)
    for name in given:
        if name not in get_args(Module):
            near, known = did_you_mean(name, MODULES), ", ".join(MODULES)
            raise UserError(f"no module {name!r} to recompute{near}there are {known}")
    return tuple(m for m in MODULES if m in given)


@lru_cache(maxsize=1 << 12)
def again(p: Program) -> Mapping[int, Again]:
    """For each primitive, by the identity of its value, the modules any of which compute it again."""
    out: dict[int, set[Module]] = {id(step.value): set() for step in p.steps}
    for module, steps in _parts(p):
        for step in steps:
            out[id(step.value)].add(module)
    return {i: frozenset(found) for i, found in out.items()}


@lru_cache(maxsize=1 << 12)
def whole(p: Program) -> Again:
    """The modules that compute all of a node again."""
    return frozenset.intersection(*again(p).values()) if p.steps else NONE


def norm(p: Program) -> bool:
    """Whether a node is a norm and no more."""
    return isinstance(p.value.source.op, Normalize) and len(p.inputs) == 1


def _parts(p: Program) -> Iterator[tuple[Module, Iterable[Step]]]:
    ops = [step.value.op for step in p.steps]
    if any(isinstance(op, Route) for op in ops):
        yield "moe", p.steps
        yield "moe_act", _between(p)
        yield "shared_experts", (s for s in p.steps if s.name.startswith("shared."))
        return
    cores = [step for step in p.steps if isinstance(step.value.op, Attend)]
    yield "core_attn", cores
    if isinstance(p.value.op, MLA):  # what has heads; the turning keys that enter it are few, and not counted
        yield "mla_up_proj", (s for s in p.steps if s not in cores and any(d in s.value.shape for d in HEADS))
    if sum(isinstance(op, Dot) for op in ops) > 1 and not any(isinstance(op, Attend | Scan | Conv) for op in ops):
        yield "mlp", p.steps


def _between(p: Program) -> Iterator[Step]:
    """What experts compute element by element for a product of theirs."""
    steps = {id(step.value): step for step in p.steps if step.outer}
    todo = [a for step in steps.values() if isinstance(step.value.op, Dot) for a in step.value.args]
    while todo:
        step = steps.pop(id(todo.pop().source), None)
        if step is not None:
            todo += step.value.args
            if step.value.op.elementwise:
                yield step
