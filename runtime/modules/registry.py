"""The torch module of each layer.

`build_module(node, context)` returns the module of a node, a function of the node's inputs in their order. It is built
on megatron-core's where that computes the layer's function, else it runs the node's own body (`Body`). So a layer need
not be registered. A layer with a faster module has two methods, `module(self, context)` and `parameters(self, w)` (see
`parameters`), which import torch when they are called. For a class that you cannot edit, use
`registered_module.register` and `parameters.parameters.register`.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

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
from megaloom.dsl.facts.primitives import fitted, program
from megaloom.planner.contract.capability import Execution
from megaloom.planner.contract.module_kinds import MODULES
from megaloom.runtime.body.body_module import Body
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.build_context import DTYPES, BuildContext
from megaloom.runtime.megatron.environment import current_capability
from megaloom.runtime.megatron.kernels import Norm
from megaloom.runtime.ops.elementwise import UNARY

from . import layers
from .moe import Mixture


def build_module(node: Node, context: BuildContext) -> nn.Module:
    """Return the torch module of a node. Raise UserError if the node cannot be trained."""
    context, execution = context.of_node(node), node_execution(node, context)
    registered = execution.module or _registered_elsewhere(node, context)
    module = registered_module(node.op, context) if registered else None
    if isinstance(module, Mixture):
        module.experts.grouped = execution.grouped_experts
    if module is None:
        return Body(node, context, execution)
    if any(s.frozen for s in node.weights):
        if any(s.trained for s in node.weights):
            raise UserError(f"{node.name} has frozen and trained weights, so it cannot run as a torch module")
        module.requires_grad_(False)
    return module


def node_execution(node: Node, context: BuildContext) -> Execution:
    """Return how this process runs a node, as plans for it assume."""
    (precision,) = (p for p, dtype in DTYPES.items() if dtype is context.config.params_dtype)
    return current_capability().execution(node, context.split, precision)


def _registered_elsewhere(node: Node, context: BuildContext) -> bool:
    """True if a user has registered a module for a class that the planner does not know, and the layout divides it."""
    kind = registered_module.dispatch(type(node.op))
    known = any(registered_module.registry.get(t) is kind for t in (object, *MODULES))
    return not known and fitted(program(node), context.split) is program(node)


@singledispatch
def registered_module(op: Op, context: BuildContext) -> nn.Module | None:
    """Return the module of an op that `capability` says runs as one; None if its class has none."""
    method = getattr(op, "module", None)
    return None if method is None else method(context)


@registered_module.register
def _(op: Embed, context: BuildContext) -> nn.Module:
    return layers.Embedding(op.table, context)


@registered_module.register
def _(op: Positions, context: BuildContext) -> nn.Module:
    return layers.LearnedPositions(op.table, op.offset, context)


@registered_module.register
def _(op: Unembed, context: BuildContext) -> nn.Module:
    return layers.Logits(op.table, op.bias, context)


@registered_module.register
def _(op: Dropout, context: BuildContext) -> nn.Module:
    return layers.HiddenDropout(op.rate, context.config.hidden_size, context)


@registered_module.register
def _(op: Pointwise, context: BuildContext) -> nn.Module:
    return layers.Sum()


@registered_module.register(RMSNorm)
@registered_module.register(LayerNorm)
def _(op: RMSNorm | LayerNorm, context: BuildContext) -> nn.Module:
    return norm(op, context.config.hidden_size, context)


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


@registered_module.register
def _(op: Attention, context: BuildContext) -> nn.Module:
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


@registered_module.register(MLP)
@registered_module.register(SwiGLU)
@registered_module.register(GeGLU)
@registered_module.register(ClampedGLU)
def _(op: Layer, context: BuildContext) -> nn.Module:
    return layers.FeedForward(context, context.layer_config(**feed_forward(op)))


@registered_module.register
def _(op: MoE, context: BuildContext) -> nn.Module:
    expert, shared = feed_forward(op.expert), {} if op.shared is None else feed_forward(op.shared)
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
    return Mixture(op, config, shared_config, context.groups)


@singledispatch
def feed_forward(op: Layer) -> dict[str, Any]:
    """Return the fields of TransformerConfig that describe an MLP; none for another layer."""
    return {}


@feed_forward.register
def _(op: MLP) -> dict[str, Any]:
    return _mlp_fields(op.ff, op.act, gated=False, bias=op.bias)


@feed_forward.register
def _(op: GeGLU) -> dict[str, Any]:
    return _mlp_fields(op.ff, op.act, gated=True, bias=False)


@feed_forward.register
def _(op: SwiGLU) -> dict[str, Any]:
    fused = device.gpu_count() > 0  # one compiled kernel; not on CPU
    return _mlp_fields(op.ff, "silu", gated=True, bias=op.bias) | {"bias_activation_fusion": fused}


@feed_forward.register
def _(op: ClampedGLU) -> dict[str, Any]:
    clamp = {"activation_func_clamp_value": op.limit, "glu_linear_offset": 1.0}
    return _mlp_fields(op.ff, "quick_gelu", gated=True, bias=True) | clamp


def _mlp_fields(ff: int, act: str, *, gated: bool, bias: bool) -> dict[str, Any]:
    """Return the fields that all MLPs set: channels, activation, gate, biases."""
    return {
        "ffn_hidden_size": ff,
        "activation_func": UNARY[act],
        "gated_linear_unit": gated,
        "add_bias_linear": bias,
    }
