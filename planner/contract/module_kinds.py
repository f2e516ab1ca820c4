"""Kinds of graph nodes that run as a torch module in Megaloom's own runtime. Every other layer runs by its body.

`capability` decides by `runs_as_module`, and the runtime builds what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from megaloom.dsl import (
    MLP,
    Attend,
    Attention,
    ClampedGLU,
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
)
from megaloom.dsl.facts.primitives import fitted, program
from megaloom.dsl.ops.documents import reads_documents
from megaloom.dsl.sharding_table import SEQUENCES

FEED_FORWARD = (MLP, SwiGLU, GeGLU, ClampedGLU)


def runs_as_module(node: Node, split: Split) -> bool:
    """True if a torch module computes a layer, else its body is evaluated.

    A module shards every dim of its weights evenly. A body keeps dims whole that do not divide.
    """
    op = node.op
    if fitted(program(node), split) is not program(node) or reads_documents(node.value) or _shares_weights(node):
        return False
    kind = next((t for t in type(op).__mro__ if t in MODULES), None)
    if kind is None:
        return hasattr(op, "module")
    if not _shards_keys(node, split):
        return False
    if not (_has_tokens(node) or _needs_no_tokens(op, split)) or _is_other_dropout(node):
        return False
    has_body_of_kind = getattr(kind, "body", None) is getattr(type(op), "body", None)  # a subclass may override it
    return has_body_of_kind and MODULES[kind](op, split)


def _shares_weights(node: Node) -> bool:
    """True if a layer has weights that other layers may have too, apart from the table of an embedding or of logits."""
    tables = isinstance(node.op, (Embed, Positions, Unembed)) or hasattr(node.op, "module")
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


def _is_sum(op: Op, split: Split) -> bool:
    return isinstance(op, Pointwise) and op.fn == "add"


def _is_hidden_norm(op: Op, split: Split) -> bool:
    return isinstance(op, RMSNorm | LayerNorm) and op.over == "embed" and not op.plus_one


def _is_megatron_attention(op: Op, split: Split) -> bool:
    """True if megatron-core's SelfAttention computes the layer."""
    if not isinstance(op, Attention):
        return False
    plain_core = not op.gated and op.core == Attend(causal=op.causal, dropout=op.dropout)  # no window, softcap, sink, …
    plain_rope = not isinstance(op.rope, Rope) or op.rope.magnitude == 1.0
    return plain_core and plain_rope and (op.qk_norm is None or _is_plain_norm(op.qk_norm))


def _is_plain_norm(op: Op) -> bool:
    """True for an RMSNorm or a LayerNorm whose scale is the weight, not 1 + the weight."""
    kinds = (RMSNorm, LayerNorm)
    return isinstance(op, kinds) and any(type(op).body is kind.body for kind in kinds) and not op.plus_one


def _is_megatron_mixture(op: Op, split: Split) -> bool:
    """True if megatron-core's MoELayer computes the layer: feed-forward experts, shared ones without biases.

    With etp each device of an expert would add the full bias.
    """
    if not isinstance(op, MoE) or not _is_megatron_mlp(op.expert, split):
        return False
    if op.shared is not None and (not _is_megatron_mlp(op.shared, split) or _has_biases(op.shared)):
        return False
    return split.etp == 1 or not _has_biases(op.expert)


def _is_megatron_mlp(op: Op, split: Split) -> bool:
    """True if megatron-core's MLP computes the layer. It has no dropout inside."""
    return isinstance(op, FEED_FORWARD) and not (isinstance(op, MLP | GeGLU) and op.dropout)


def _has_biases(op: Layer) -> bool:
    return isinstance(op, ClampedGLU) or (isinstance(op, MLP | SwiGLU) and op.bias)


# Kinds of ops that a torch module computes, with the condition on their options. Other layers have a method `module`.
MODULES: Mapping[type[Op], Callable[[Op, Split], bool]] = MappingProxyType(
    {
        **dict.fromkeys((Embed, Positions, Unembed, Dropout), _always),
        **dict.fromkeys(FEED_FORWARD, _is_megatron_mlp),
        **dict.fromkeys((RMSNorm, LayerNorm), _is_hidden_norm),
        Pointwise: _is_sum,
        Attention: _is_megatron_attention,
        MoE: _is_megatron_mixture,
    }
)
