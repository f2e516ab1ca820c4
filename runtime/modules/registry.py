"""The torch module of each layer.

`build_module(node, context)` returns the module of a node, a function of the node's inputs in their order. It is built
on megatron-core's where `planner.contract.module_kinds` says that it computes the layer, else it runs the node's own
body (`Body`). A layer of one's own with a faster module has two methods, `module(self, context)` and
`parameters(self, w)` (see `parameters`), which import torch when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from attrs import evolve
from torch import nn

from megaloom.dsl import (
    MLP,
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
    UserError,
)
from megaloom.planner.contract.module_kinds import has_biases, is_gated, module_kind
from megaloom.runtime.body.body_module import Body
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.build_context import BuildContext
from megaloom.runtime.megatron.kernels import Norm
from megaloom.runtime.ops.elementwise import UNARY

from . import layers
from .moe import Mixture


def build_module(node: Node, context: BuildContext) -> nn.Module:
    """Return the torch module of a node. Raise UserError if the node cannot be trained."""
    execution = context.execution(node)
    context = evolve(context.of_node(node), engine=execution.engine, stacked_experts=execution.stacked_experts)
    if not execution.module:
        return Body(node, context, execution)
    op: Any = node.op
    kind = module_kind(op)
    constructor = None if kind is None else CONSTRUCTORS.get(kind.op)
    module: nn.Module = op.module(context) if constructor is None else constructor(op, context)
    if any(s.frozen for s in node.weights):
        if any(s.trained for s in node.weights):
            raise UserError(f"{node.name} has frozen and trained weights, so it cannot run as a torch module")
        module.requires_grad_(False)
    return module


def build_on_meta(node: Node, context: BuildContext) -> nn.Module:
    """Return the torch module of a node, whose parameters are on the meta device, with the attributes that they had."""
    module = build_module(node, context)
    empty: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, p in part.named_parameters(recurse=False):
            if p not in empty:
                empty[p] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
                vars(empty[p]).update(vars(p))
            part.register_parameter(name, empty[p])
    return module


def norm(op: RMSNorm | LayerNorm, size: int, context: BuildContext) -> nn.Module:
    """Return a norm over a dim of this size."""
    return Norm(
        size,
        rms=isinstance(op, RMSNorm),
        eps=op.eps,
        bias=isinstance(op, LayerNorm) and op.bias,
        sequence_parallel=context.config.sequence_parallel,
        dtype=context.config.params_dtype,
    )


def _attention(op: Attention, context: BuildContext) -> nn.Module:
    rope, qk_norm = layers.rope_of(op), op.qk_norm
    head_dim = context.config.hidden_size // op.heads if op.head_dim is None else op.head_dim
    norms = tuple(norm(qk_norm, head_dim, context) for _ in "qk") if isinstance(qk_norm, RMSNorm | LayerNorm) else ()
    config = context.layer_config(
        num_attention_heads=op.heads,
        num_query_groups=op.heads if op.kv_heads is None else op.kv_heads,
        kv_channels=head_dim,
        attention_dropout=op.dropout,
        add_bias_linear=op.bias,
        add_qkv_bias=op.qkv_bias,
        rotary_interleaved=rope is not None and rope.interleaved,
        apply_rope_fusion=device.gpu_count() > 0 and rope is not None and not rope.interleaved,
    )
    return layers.SelfAttention(op, context, config, norms)


def _mixture(op: MoE, context: BuildContext) -> nn.Module:
    expert, shared = feed_forward_fields(op.expert), {} if op.shared is None else feed_forward_fields(op.shared)
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
    shared_config = None
    if shared:
        shared_config = context.layer_config(**shared, moe_shared_expert_intermediate_size=shared["ffn_hidden_size"])
    return Mixture(op, config, shared_config, context)


def feed_forward_fields(op: Layer) -> dict[str, Any]:
    """Return the fields of TransformerConfig that describe an MLP: channels, activation, gate, biases."""
    fields: dict[str, Any] = {"gated_linear_unit": is_gated(op), "add_bias_linear": has_biases(op)}
    match op:
        case MLP() | GeGLU():
            return {**fields, "ffn_hidden_size": op.ff, "activation_func": UNARY[op.act]}
        case SwiGLU():
            fused = device.gpu_count() > 0  # one compiled kernel; not on CPU
            own = {"activation_func": UNARY["silu"], "bias_activation_fusion": fused}
            return {**fields, "ffn_hidden_size": op.ff, **own}
        case ClampedGLU():
            clamp = {"activation_func_clamp_value": op.limit, "glu_linear_offset": 1.0}
            return {**fields, "ffn_hidden_size": op.ff, "activation_func": UNARY["quick_gelu"], **clamp}
    raise TypeError(f"megatron-core's MLP does not compute {type(op).__name__}")


CONSTRUCTORS: Mapping[type[Op], Callable[[Any, BuildContext], nn.Module]] = MappingProxyType(
    {
        Embed: lambda op, context: layers.Embedding(op.table, context),
        Positions: lambda op, context: layers.LearnedPositions(op.table, op.offset, context),
        Unembed: lambda op, context: layers.Logits(op.table, op.bias, context),
        Dropout: lambda op, context: layers.HiddenDropout(op.rate, context.config.hidden_size, context),
        Pointwise: lambda op, context: layers.Sum(),
        **dict.fromkeys((RMSNorm, LayerNorm), lambda op, context: norm(op, context.config.hidden_size, context)),
        **dict.fromkeys(
            (MLP, SwiGLU, GeGLU, ClampedGLU),
            lambda op, context: layers.FeedForward(context, context.layer_config(**feed_forward_fields(op))),
        ),
        Attention: _attention,
        MoE: _mixture,
    }
)
"""Constructor of the module of each layer class that has a row in `module_kinds`."""
