"""A layer of the graph as a torch module: the one place that says which.

Protocol: `module(op, site)` gives the module of one node, a function of the node's inputs in their order. Registering a
function for a layer's class makes that layer trainable; what makes up its parameters is said in `weights`.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from torch import nn

from megaloom.dsl import (
    MLP,
    Attention,
    Dropout,
    Embed,
    Layer,
    LayerNorm,
    MoE,
    Op,
    Pointwise,
    Positions,
    RMSNorm,
    SwiGLU,
    Unembed,
    UserError,
)

from . import device, modules
from .evaluate import UNARY
from .kernels import Norm
from .site import Site


@singledispatch
def module(op: Op, site: Site) -> nn.Module:
    """The torch module of an op. Raises UserError for one that has none."""
    at = f" ({op.at})" if isinstance(op, Layer) else ""
    known = ", ".join(sorted(t.__name__ for t in module.registry if t is not object))
    raise UserError(f"no torch module is registered for {op}{at}\nthere are modules for {known}")


@module.register
def _(op: Embed, site: Site) -> nn.Module:
    return modules.Embedding(op.table, site)


@module.register
def _(op: Positions, site: Site) -> nn.Module:
    return modules.LearnedPositions(op.table, site)


@module.register
def _(op: Unembed, site: Site) -> nn.Module:
    return modules.Logits(op.table, site)


@module.register
def _(op: Dropout, site: Site) -> nn.Module:
    return modules.Drop(op.rate, site)


@module.register
def _(op: Pointwise, site: Site) -> nn.Module:
    if op.fn != "add":
        raise UserError(f"between layers the runtime can add, not {op.fn}: put it into a layer")
    return modules.Sum()


@module.register(RMSNorm)
@module.register(LayerNorm)
def _(op: RMSNorm | LayerNorm, site: Site) -> nn.Module:
    rms = isinstance(op, RMSNorm)
    return Norm(
        site.config.hidden_size,
        rms=rms,
        eps=op.eps,
        bias=not rms,
        sequence_parallel=site.config.sequence_parallel,
        dtype=site.config.params_dtype,
    )


@module.register
def _(op: Attention, site: Site) -> nn.Module:
    config = site.with_(
        num_attention_heads=op.heads,
        num_query_groups=op.heads if op.kv_heads is None else op.kv_heads,
        kv_channels=site.config.hidden_size // op.heads if op.head_dim is None else op.head_dim,
        attention_dropout=op.dropout,
        add_bias_linear=op.bias,
    )
    return modules.SelfAttention(op, site, config)


@module.register(MLP)
@module.register(SwiGLU)
def _(op: Layer, site: Site) -> nn.Module:
    return modules.FeedForward(site, site.with_(**feed_forward(op)))


@module.register
def _(op: MoE, site: Site) -> nn.Module:
    expert = feed_forward(op.expert)
    if expert.get("add_bias_linear"):
        raise UserError(f"an expert with biases ({op.expert}, {op.at}) cannot be trained: leave them out")
    config = site.with_(
        **expert,
        num_moe_experts=op.experts,
        moe_ffn_hidden_size=expert["ffn_hidden_size"],
        moe_router_topk=op.top_k,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss" if op.balance else "none",
        moe_aux_loss_coeff=op.balance,
        moe_token_dispatcher_type="alltoall",
    )
    return modules.Mixture(site, config)


@singledispatch
def feed_forward(op: Layer) -> dict[str, Any]:
    """The fields of megatron-core's configuration that say what an MLP computes."""
    raise UserError(f"no torch module is registered for {op} as an expert ({op.at})\nan expert can be SwiGLU or MLP")


@feed_forward.register
def _(op: MLP) -> dict[str, Any]:
    return {
        "ffn_hidden_size": op.ff,
        "activation_func": UNARY[op.act],
        "gated_linear_unit": False,
        "add_bias_linear": op.bias,
    }


@feed_forward.register
def _(op: SwiGLU) -> dict[str, Any]:
    return {
        "ffn_hidden_size": op.ff,
        "activation_func": UNARY["silu"],
        "gated_linear_unit": True,
        "bias_activation_fusion": device.gpus() > 0,  # one kernel; compiled, so not on CPU
    }
