"""A layer of the graph as a torch module: the one place that says which.

Protocol: `module(node, context)` gives the module of a node, a function of the node's inputs in their order. It is
megatron-core's where there is one that computes the same, else the node's own body (`body`): no layer needs to be
registered. A layer that has a faster module says so in two methods, `module(self, context)` and `parameters(self, w)`
(see `weights`), which import what they need when they are called; `registered.register` and
`parameters.parameters.register` do the same for layers that somebody else wrote.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from torch import nn

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
    SwiGLU,
    Unembed,
)
from megaloom.dsl.facts.primitives import fitted, program
from megaloom.runtime.body.body_module import Body
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.build_context import BuildContext
from megaloom.runtime.megatron.kernels import Norm
from megaloom.runtime.reference.evaluate import UNARY

from . import layers
from .moe import Mixture


def module(node: Node, context: BuildContext) -> nn.Module:
    """The torch module of a node. Raises UserError for one that cannot be trained."""
    divided = fitted(program(node), context.split) is program(node)  # modules shard all dims, a body keeps some whole
    made = registered(node.op, context) if divided and _meant(node.op) else None
    return Body(node, context) if made is None else made


def _meant(op: Op) -> bool:
    """Whether what is registered for an op's class is for its body, and not for that of a class it inherits from."""
    of = next((t for t in type(op).__mro__ if t in registered.registry), object)
    return of is object or getattr(of, "body", None) is getattr(type(op), "body", None)


@singledispatch
def registered(op: Op, context: BuildContext) -> nn.Module | None:
    """A module made for this class of op; None if there is none, or none with the options of this one."""
    own = getattr(op, "module", None)
    return None if own is None else own(context)


@registered.register
def _(op: Embed, context: BuildContext) -> nn.Module:
    return layers.Embedding(op.table, context)


@registered.register
def _(op: Positions, context: BuildContext) -> nn.Module:
    return layers.LearnedPositions(op.table, op.offset, context)


@registered.register
def _(op: Unembed, context: BuildContext) -> nn.Module:
    return layers.Logits(op.table, op.bias, context)


@registered.register
def _(op: Dropout, context: BuildContext) -> nn.Module:
    return layers.Drop(op.rate, context)


@registered.register
def _(op: Pointwise, context: BuildContext) -> nn.Module | None:
    return layers.Sum() if op.fn == "add" else None


@registered.register(RMSNorm)
@registered.register(LayerNorm)
def _(op: RMSNorm | LayerNorm, context: BuildContext) -> nn.Module | None:
    return norm(op, context.config.hidden_size, context) if op.over == "embed" and not op.plus_one else None


def norm(op: RMSNorm | LayerNorm, size: int, context: BuildContext) -> nn.Module:
    """A norm over a dim of this size."""
    return Norm(
        size,
        rms=isinstance(op, RMSNorm),
        eps=op.eps,
        bias=isinstance(op, LayerNorm) and op.bias,
        sequence_parallel=context.config.sequence_parallel,
        dtype=context.config.params_dtype,
    )


@registered.register
def _(op: Attention, context: BuildContext) -> nn.Module | None:
    turn, own = layers.turning(op), op.qk_norm
    if op.core != Attend(causal=op.causal, dropout=op.dropout) or (turn and turn.magnitude != 1.0):
        return None
    if own is not None and not (_meant(own) and isinstance(own, RMSNorm | LayerNorm) and not own.plus_one):
        return None
    head_dim = context.config.hidden_size // op.heads if op.head_dim is None else op.head_dim
    norms = tuple(norm(own, head_dim, context) for _ in "qk") if isinstance(own, RMSNorm | LayerNorm) else ()
    config = context.layer_config(
        num_attention_heads=op.heads,
        num_query_groups=op.heads if op.kv_heads is None else op.kv_heads,
        kv_channels=head_dim,
        attention_dropout=op.dropout,
        add_bias_linear=op.bias,
        add_qkv_bias=op.qkv_bias,
        rotary_interleaved=turn is not None and turn.interleaved,
        apply_rope_fusion=device.gpus() > 0 and turn is not None and not turn.interleaved,
    )
    return layers.SelfAttention(op, context, config, norms)


@registered.register(MLP)
@registered.register(SwiGLU)
@registered.register(GeGLU)
@registered.register(ClampedGLU)
def _(op: Layer, context: BuildContext) -> nn.Module:
    return layers.FeedForward(context, context.layer_config(**feed_forward(op)))


@registered.register
def _(op: MoE, context: BuildContext) -> nn.Module | None:
    expert, shared = feed_forward(op.expert), {} if op.shared is None else feed_forward(op.shared)
    if not expert or (op.shared is not None and shared.get("add_bias_linear", True)):
        return None
    if expert["add_bias_linear"] and context.groups.layout.etp > 1:
        return None  # each device of etp would add the bias of all of them
    config = context.layer_config(
        **expert,
        num_moe_experts=op.experts,
        moe_ffn_hidden_size=expert["ffn_hidden_size"],
        moe_shared_expert_intermediate_size=shared.get("ffn_hidden_size"),
        moe_router_topk=op.top_k,
        moe_router_enable_expert_bias=op.corrected,
        moe_router_load_balancing_type="none",  # our router adds the loss
        moe_token_dispatcher_type="alltoall",
    )
    return Mixture(
        op,
        config,
        context.layer_config(**shared, moe_shared_expert_intermediate_size=shared["ffn_hidden_size"])
        if shared
        else None,
        context.groups,
    )


@singledispatch
def feed_forward(op: Layer) -> dict[str, Any]:
    """The fields of megatron-core's configuration that say what an MLP computes; none for another layer."""
    return {}


@feed_forward.register
def _(op: MLP) -> dict[str, Any]:
    return {
        "ffn_hidden_size": op.ff,
        "activation_func": UNARY[op.act],
        "gated_linear_unit": False,
        "add_bias_linear": op.bias,
    }


@feed_forward.register
def _(op: GeGLU) -> dict[str, Any]:
    return {
        "ffn_hidden_size": op.ff,
        "activation_func": UNARY[op.act],
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }


@feed_forward.register
def _(op: SwiGLU) -> dict[str, Any]:
    return {
        "ffn_hidden_size": op.ff,
        "activation_func": UNARY["silu"],
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "bias_activation_fusion": device.gpus() > 0,  # one kernel; compiled, so not on CPU
    }


@feed_forward.register
def _(op: ClampedGLU) -> dict[str, Any]:
    return {
        "ffn_hidden_size": op.ff,
        "activation_func": UNARY["quick_gelu"],
        "gated_linear_unit": True,
        "add_bias_linear": True,
        "activation_func_clamp_value": op.limit,
        "glu_linear_offset": 1.0,
    }
