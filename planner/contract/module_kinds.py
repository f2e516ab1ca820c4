"""Layers that megatron-core has a module of: one row per class, with its condition, parameters and role in a model.

`capability` decides by `runs_as_module`, and the runtime builds what it says. Every other layer runs by its body.
Initial weights, checkpoints, conversions and exports read the parameters and roles of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

from attrs import evolve, frozen

from megaloom.dsl import (
    MLA,
    MLP,
    Attend,
    Attention,
    ClampedGLU,
    CrossAttention,
    Dropout,
    Embed,
    GeGLU,
    Layer,
    LayerNorm,
    MoE,
    Node,
    Op,
    Pointwise,
    Positions,
    RMSNorm,
    Rope,
    Split,
    SwiGLU,
    Unembed,
    Value,
)
from megaloom.dsl.facts.primitives import fitted, program
from megaloom.dsl.ops.documents import reads_documents
from megaloom.dsl.sharding_table import SEQUENCES

from .engine_parts import NO_PARTS, EnginePart

TABLES = (Embed, Positions, Unembed)
"""Layers whose module has one row of its `table` for each token or position."""
FIRST_WEIGHTS: Mapping[type[Op], tuple[str, ...]] = MappingProxyType(
    {MLP: ("up",), SwiGLU: ("gate", "up"), GeGLU: ("gate", "up"), ClampedGLU: ("gate", "up")}
)
"""Feed-forward layers, with the weights before the activation. One parameter has them all."""
LOCAL_EXPERTS = "experts.local_experts."
"""Prefix of the parameters of one expert, before the expert's number."""
STACKED_EXPERTS = "experts."
"""Prefix of the parameters of all experts, where one has the weights of all."""


class Role(Enum):
    """The part of Megatron-LM's models that a layer is."""

    EMBEDDING = auto()
    POSITIONS = auto()
    NORM = auto()
    ATTENTION = auto()
    CROSS_ATTENTION = auto()
    FEED_FORWARD = auto()
    LOGITS = auto()


@frozen
class Parameter:
    """A parameter of a module: its name there, and the weights of the layer that make it up.

    A weight is a matrix of rows by columns: `columns` are the dims of a row, all other dims count the rows. The rows of
    several weights follow one another; with `by_head` those of each key/value head.
    """

    name: str
    weights: tuple[str | Value, ...]  # by name in the layer; a table that the layer was given, by its value
    columns: tuple[str, ...] = ()
    by_head: bool = False
    of_expert: bool = False  # each expert has one; its name is without LOCAL_EXPERTS and the number

    def inside(self, module: str, layer: str) -> Parameter:
        """Return the parameter of a module inside of another, whose layer is inside of another layer."""
        weights = tuple(w if isinstance(w, Value) else f"{layer}.{w}" for w in self.weights)
        return evolve(self, name=f"{module}{self.name}", weights=weights)


@frozen
class ModuleKind:
    """A layer class of which megatron-core has a module, or Megaloom one that fits between those.

    Each function takes an op of the class.
    """

    op: type[Op]
    role: Role | None  # in Megatron-LM's models; None: inside of another layer, or nowhere
    runs: Callable[[Any, Split], bool] | None  # True if our runtime runs the module; None: it runs the body
    parameters: Callable[[Any], Iterator[Parameter]] | None  # None: not known
    engine: frozenset[EnginePart]  # parts of the module that Transformer Engine has


def module_kind(op: Op) -> ModuleKind | None:
    """Return the row of an op; None if megatron-core has no module of it."""
    return next((MODULES[t] for t in type(op).__mro__ if t in MODULES), None)


def module_parameters(op: Op) -> tuple[Parameter, ...]:
    """Return the parameters of an op's module; none if they are not known."""
    kind = module_kind(op)
    return () if kind is None or kind.parameters is None else tuple(kind.parameters(op))


def kinds_at(role: Role, *, named: bool = False) -> tuple[type[Op], ...]:
    """Return the layer classes that a part of Megatron-LM's models may be. named: only those of known parameters."""
    rows = (row for row in MODULES.values() if row.role is role)
    return tuple(row.op for row in rows if row.parameters or not named)


def runs_as_module(node: Node, split: Split) -> bool:
    """True if a torch module computes a layer, else its body is evaluated.

    A module shards every dim of its weights evenly. A body keeps dims whole that do not divide.
    """
    op = node.op
    if fitted(program(node), split) is not program(node) or reads_documents(node.value) or _shares_weights(node):
        return False
    kind = module_kind(op)
    if kind is None or kind.runs is None:
        return hasattr(op, "module")
    if not _shards_keys(node, split):
        return False
    if not (_has_tokens(node) or _needs_no_tokens(op, split)) or _is_other_dropout(node):
        return False
    has_body_of_kind = getattr(kind.op, "body", None) is getattr(type(op), "body", None)  # a subclass may override it
    return has_body_of_kind and kind.runs(op, split)


def _shares_weights(node: Node) -> bool:
    """True if a layer has weights that other layers may have too, apart from the table of an embedding or of logits."""
    tables = isinstance(node.op, TABLES) or hasattr(node.op, "module")
    return not tables and any(not s.name.startswith(f"{node.name}.") for s in node.weights)


def _shards_keys(node: Node, split: Split) -> bool:
    """True if tp divides the key/value heads of a layer, or the channels of all keys and values together."""
    for slot in node.weights:
        known = {d.name: d.known for d in slot.dims if d.size is not None}
        heads, channels = known.get("kv_heads", 0), known.get("head_dim", 0)
        if heads % split.tp and 2 * heads * channels % split.tp:
            return False
    return True


def _has_tokens(node: Node) -> bool:
    """True if the sequence of a node is that of the tokens, as modules assume under any layout."""
    return any(name in node.shape for name in SEQUENCES)


def _is_other_dropout(node: Node) -> bool:
    """True for a Dropout of other values than hidden states, such as logits."""
    return isinstance(node.op, Dropout) and [d.name for d in node.shape] != ["batch", "seq", "embed"]


def _needs_no_tokens(op: Op, split: Split) -> bool:
    """True if the module computes any other sequence too, such as the patches of an image."""
    whole = not split.sequence_parallel and split.cp == 1
    return whole and not isinstance(op, Positions) and not (isinstance(op, Attention) and op.rope is not None)


def _always(op: Op, split: Split) -> bool:
    return True


def _is_sum(op: Pointwise, split: Split) -> bool:
    return op.fn == "add"


def _is_hidden_norm(op: RMSNorm | LayerNorm, split: Split) -> bool:
    return op.over == "embed" and not op.plus_one


def _is_megatron_attention(op: Attention, split: Split) -> bool:
    """True if megatron-core's SelfAttention computes the layer."""
    plain_core = not op.gated and op.core == Attend(causal=op.causal, dropout=op.dropout)  # no window, softcap, sink, …
    plain_rope = not isinstance(op.rope, Rope) or op.rope.magnitude == 1.0
    return plain_core and plain_rope and (op.qk_norm is None or _is_plain_norm(op.qk_norm))


def _is_plain_norm(op: Op) -> bool:
    """True for an RMSNorm or a LayerNorm whose scale is the weight, not 1 + the weight."""
    kinds = (RMSNorm, LayerNorm)
    return isinstance(op, kinds) and any(type(op).body is kind.body for kind in kinds) and not op.plus_one


def _is_megatron_mixture(op: MoE, split: Split) -> bool:
    """True if megatron-core's MoELayer computes the layer: feed-forward experts, shared ones without biases.

    With etp each device of an expert would add the full bias.
    """
    if not _is_megatron_mlp(op.expert, split):
        return False
    if op.shared is not None and (not _is_megatron_mlp(op.shared, split) or has_biases(op.shared)):
        return False
    return split.etp == 1 or not has_biases(op.expert)


def _is_megatron_mlp(op: Op, split: Split) -> bool:
    """True if megatron-core's MLP computes the layer. It has no dropout inside."""
    return isinstance(op, tuple(FIRST_WEIGHTS)) and not (isinstance(op, MLP | GeGLU) and op.dropout)


def has_biases(op: Op) -> bool:
    """True if the projections of a feed-forward layer have biases."""
    return isinstance(op, ClampedGLU) or (isinstance(op, MLP | SwiGLU) and op.bias)


def is_gated(op: Op) -> bool:
    """True if a feed-forward layer, or the experts of a mixture, are gated units."""
    return is_gated(op.expert) if isinstance(op, MoE) else len(_first_weights(op)) > 1


def _first_weights(op: Op) -> tuple[str, ...]:
    return next((FIRST_WEIGHTS[t] for t in type(op).__mro__ if t in FIRST_WEIGHTS), ())


def _no_parameters(op: Op) -> Iterator[Parameter]:
    return iter(())


def _of_table(op: Embed | Positions | Unembed) -> Iterator[Parameter]:
    """Yield one row per token or position, whichever dim the table was declared with first; and the bias of logits."""
    yield Parameter("weight", (op.table,), ("embed",))
    if isinstance(op, Unembed) and op.bias:
        yield Parameter("bias", ("bias",))


def _of_norm(op: RMSNorm | LayerNorm) -> Iterator[Parameter]:
    yield Parameter("weight", ("scale",))
    if isinstance(op, LayerNorm) and op.bias:
        yield Parameter("bias", ("shift",))


def _of_attention(op: Attention | CrossAttention) -> Iterator[Parameter]:
    """Yield the parameters of SelfAttention or CrossAttention. Projections in one parameter alternate head by head."""
    projections = (("linear_qkv", "qkv"),) if isinstance(op, Attention) else (("linear_q", "q"), ("linear_kv", "kv"))
    for name, weights in projections:
        yield Parameter(f"{name}.weight", tuple(weights), ("embed",), by_head=len(weights) > 1)
    yield Parameter("linear_proj.weight", ("o",), ("heads", "head_dim"))
    for name, weights in projections if op.bias or op.qkv_bias else ():
        yield Parameter(f"{name}.bias", tuple(f"{w}_bias" for w in weights), by_head=len(weights) > 1)
    norm = module_parameters(op.qk_norm) if isinstance(op, Attention) and op.qk_norm is not None else ()
    yield from (p.inside(f"{name}_layernorm.", f"{name}_norm") for name in "qk" for p in norm)
    if op.bias:
        yield Parameter("linear_proj.bias", ("o_bias",))


def _of_mlp(op: Layer) -> Iterator[Parameter]:
    first = _first_weights(op)
    yield Parameter("linear_fc1.weight", first, ("embed",))
    yield Parameter("linear_fc2.weight", ("down",), ("ff",))
    if has_biases(op):
        yield Parameter("linear_fc1.bias", tuple(f"{name}_bias" for name in first))
        yield Parameter("linear_fc2.bias", ("down_bias",))


def _of_mixture(op: MoE) -> Iterator[Parameter]:
    yield Parameter("router.weight", ("router",), ("embed",))
    if op.bias:
        yield Parameter("router.bias", ("router_bias",))
    if op.corrected:
        yield Parameter("router.expert_bias", ("correction",))
    if op.shared is not None:
        yield from (p.inside("shared_experts.", "shared") for p in module_parameters(op.shared))
    yield from (evolve(p.inside("", "experts"), of_expert=True) for p in module_parameters(op.expert))


_ATTENTION, _LINEAR = frozenset({EnginePart.ATTENTION, EnginePart.LINEAR}), frozenset({EnginePart.LINEAR})
_EXPERTS = frozenset({EnginePart.EXPERTS})
MODULES: Mapping[type[Op], ModuleKind] = MappingProxyType(
    {
        row.op: row
        for row in (
            ModuleKind(Embed, Role.EMBEDDING, _always, _of_table, NO_PARTS),
            ModuleKind(Positions, Role.POSITIONS, _always, _of_table, NO_PARTS),
            ModuleKind(Unembed, Role.LOGITS, _always, _of_table, NO_PARTS),
            ModuleKind(Dropout, None, _always, _no_parameters, NO_PARTS),
            ModuleKind(Pointwise, None, _is_sum, _no_parameters, NO_PARTS),
            ModuleKind(RMSNorm, Role.NORM, _is_hidden_norm, _of_norm, NO_PARTS),
            ModuleKind(LayerNorm, Role.NORM, _is_hidden_norm, _of_norm, NO_PARTS),
            ModuleKind(Attention, Role.ATTENTION, _is_megatron_attention, _of_attention, _ATTENTION),
            ModuleKind(MLA, Role.ATTENTION, None, None, NO_PARTS),
            ModuleKind(CrossAttention, Role.CROSS_ATTENTION, None, _of_attention, NO_PARTS),
            ModuleKind(MLP, Role.FEED_FORWARD, _is_megatron_mlp, _of_mlp, _LINEAR),
            ModuleKind(SwiGLU, Role.FEED_FORWARD, _is_megatron_mlp, _of_mlp, _LINEAR),
            ModuleKind(GeGLU, Role.FEED_FORWARD, _is_megatron_mlp, _of_mlp, _LINEAR),
            ModuleKind(ClampedGLU, None, _is_megatron_mlp, _of_mlp, _LINEAR),
            ModuleKind(MoE, Role.FEED_FORWARD, _is_megatron_mixture, _of_mixture, _EXPERTS),
        )
    }
)
"""The rows. Layers of a user's own have a method `module` instead."""
