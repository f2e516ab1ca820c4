"""A layer of the graph as a megatron-core module.

Protocol: `module(op, site)` gives the torch module of one node. Hidden states are [seq, batch, embed] inside the
runtime (megatron-core's order); under sequence parallelism each tensor-parallel rank holds its share of seq
between the matrix products. Each module takes its node's inputs in order and returns one tensor. Parameters are
allocated but not filled: `weights` does that, the same on every layout.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, partial, singledispatch
from typing import Any

import torch
import torch.nn.functional as F
from attrs import field, frozen
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import attention, mlp
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megaloom.dsl import (
    MLP,
    Attention,
    Dropout,
    Embed,
    Graph,
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
from megaloom.planner.layout import Layout, Precision, Recompute, Workload

from . import device
from .grid import Grid
from .kernels import CoreAttention, Norm, zigzag

DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


@frozen(eq=False)
class Site:
    """Where modules are built: the grid, and the configuration that megatron-core asks of each of them."""

    grid: Grid
    fields: dict[str, Any]  # of TransformerConfig, those that all layers share
    seq: int  # tokens of a whole sequence
    config: TransformerConfig = field(init=False)

    @config.default
    def _config(self) -> TransformerConfig:
        return self.with_()

    def with_(self, **layer: Any) -> TransformerConfig:
        """The configuration with a layer's own fields."""
        return TransformerConfig(**{**self.fields, **layer})


def configure(graph: Graph, layout: Layout, workload: Workload) -> dict[str, Any]:
    """What megatron-core's modules and schedules must know of a layout, as fields of TransformerConfig."""
    dtype = DTYPES[workload.precision]
    moe = [n.op for n in graph.nodes if isinstance(n.op, MoE)]
    return dict(
        num_layers=layout.pp * layout.vpp,  # unused: our stages say which layers they hold
        hidden_size=embed(graph),
        num_attention_heads=layout.tp,
        ffn_hidden_size=embed(graph),
        num_moe_experts=moe[0].experts if moe else None,  # the schedules scale the balancing loss if there are any
        moe_ffn_hidden_size=embed(graph) if moe else None,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.sequence_parallel,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Interleaved with megatron-core's default settings is silently wrong at two pipeline ranks.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        recompute_granularity="selective" if layout.recompute is Recompute.SELECTIVE else None,
        recompute_modules=["core_attn"] if layout.recompute is Recompute.SELECTIVE else None,
        # The loss is a sum over tokens, divided once by their number over all ranks: right on any layout.
        calculate_per_token_loss=True,
        init_method=_later,
        output_layer_init_method=_later,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        cuda_graph_scope=[],
    )


def _later(weight: Tensor) -> Tensor:
    """No initial values: `weights` gives them, the same on every layout."""
    return weight


def embed(graph: Graph) -> int:
    """The size of the hidden states between the layers. Raises UserError when it is not the same everywhere."""
    sizes = {n.shape["embed"].known for n in graph.nodes if "embed" in n.shape}
    if len(sizes) != 1:
        raise UserError(f"{graph.name} has hidden states of sizes {sorted(sizes)}: the runtime carries one size")
    return sizes.pop()


def padded(vocab: int, tp: int) -> int:
    """The rows of a table of `vocab` once it is split evenly over tensor-parallel ranks."""
    return -(-vocab // tp) * tp


@singledispatch
def module(op: Op, site: Site) -> nn.Module:
    """The torch module of an op. Register a function for a layer's class to train it."""
    at = f" ({op.at})" if isinstance(op, Layer) else ""
    known = ", ".join(sorted(t.__name__ for t in module.registry if t is not object))
    raise UserError(f"no torch module is registered for {op}{at}\nthere are modules for {known}")


# ---- the two ends -------------------------------------------------------------------


class Embedding(VocabParallelEmbedding):
    """Token ids [batch, seq] → hidden states [seq, batch, embed]; the table is padded to divide by tp."""

    def __init__(self, rows: int, columns: int, config: TransformerConfig, grid: Grid) -> None:
        super().__init__(
            rows,
            columns,
            init_method=config.init_method,
            reduce_scatter_embeddings=config.sequence_parallel,
            config=config,
            tp_group=grid.groups.tp,
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        return x if self.reduce_scatter_embeddings else x.transpose(0, 1).contiguous()


class Logits(ColumnParallelLinear):
    """Hidden states [seq, batch, embed] → this rank's columns of the logits [seq, batch, vocab / tp].

    The columns that only pad the vocabulary get the lowest value there is, so that no probability goes to them.
    """

    def __init__(self, vocab: int, columns: int, config: TransformerConfig, grid: Grid) -> None:
        rows = padded(vocab, grid.layout.tp)
        super().__init__(
            columns,
            rows,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=grid.groups.tp,
        )
        self.real = max(0, min(rows // grid.layout.tp, vocab - grid.tp * (rows // grid.layout.tp)))

    def forward(self, x: Tensor) -> Tensor:
        y, _ = super().forward(x)
        if self.real < y.shape[-1]:
            y[..., self.real :] = torch.finfo(y.dtype).min
        return y


class LearnedPositions(nn.Module):
    """Add row i of a table to position i; each rank adds the rows of the positions it holds."""

    def __init__(self, rows: int, columns: int, config: TransformerConfig, grid: Grid, seq: int) -> None:
        super().__init__()
        if seq > rows:
            raise UserError(f"sequences of {seq} tokens need as many learned positions, and the model has {rows}")
        where = zigzag(seq, grid.layout.cp, grid.cp)
        if config.sequence_parallel:
            where = where.chunk(grid.layout.tp)[grid.tp]
        self.register_buffer("where", where.to(device.current()), persistent=False)
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype, device=device.current()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return x + F.embedding(self.where, self.weight)[:, None]


@module.register
def _(op: Embed, site: Site) -> nn.Module:
    rows = padded(op.table["vocab"].known, site.grid.layout.tp)
    return Embedding(rows, op.table["embed"].known, site.config, site.grid)


@module.register
def _(op: Positions, site: Site) -> nn.Module:
    return LearnedPositions(op.table["position"].known, op.table["embed"].known, site.config, site.grid, site.seq)


@module.register
def _(op: Unembed, site: Site) -> nn.Module:
    return Logits(op.table["vocab"].known, op.table["embed"].known, site.config, site.grid)


# ---- between the layers -------------------------------------------------------------


class Drop(nn.Module):
    """Dropout of hidden states; under sequence parallelism each rank draws for its own share."""

    def __init__(self, rate: float, parallel: bool) -> None:
        super().__init__()
        self.rate, self.parallel = rate, parallel

    def forward(self, x: Tensor) -> Tensor:
        with tensor_parallel.get_cuda_rng_tracker().fork() if self.parallel else nullcontext():
            return F.dropout(x, self.rate, self.training)


class Sum(nn.Module):
    """The residual's addition."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


@module.register
def _(op: Dropout, site: Site) -> nn.Module:
    return Drop(op.rate, site.config.sequence_parallel)


@module.register
def _(op: Pointwise, site: Site) -> nn.Module:
    if op.fn != "add":
        raise UserError(f"between layers the runtime can add, not {op.fn}: put it into a layer")
    return Sum()


@module.register
def _(op: RMSNorm, site: Site) -> nn.Module:
    return _norm(site, op.eps, rms=True)


@module.register
def _(op: LayerNorm, site: Site) -> nn.Module:
    return _norm(site, op.eps, rms=False)


def _norm(site: Site, eps: float, *, rms: bool) -> nn.Module:
    c = site.config
    parallel, dtype = c.sequence_parallel, c.params_dtype
    return Norm(c.hidden_size, rms=rms, eps=eps, bias=not rms, sequence_parallel=parallel, dtype=dtype)


# ---- attention ----------------------------------------------------------------------


class SelfAttention(attention.SelfAttention):
    """megatron-core's self-attention as a function of one tensor, biases added."""

    def __init__(self, op: Attention, site: Site, config: TransformerConfig) -> None:
        parts = attention.SelfAttentionSubmodules(ColumnParallelLinear, CoreAttention, RowParallelLinear)
        mask = AttnMaskType.causal if op.causal else AttnMaskType.no_mask
        super().__init__(config, parts, 1, mask, pg_collection=site.grid.groups)
        self.angles = rotary(config.kv_channels, op.rope, site.grid) if op.rope is not None else None
        self.seq = site.seq

    def forward(self, x: Tensor) -> Tensor:
        angles = None if self.angles is None else self.angles(self.seq)
        y, bias = super().forward(x, None, rotary_pos_emb=angles)
        return y if bias is None else y + bias


@cache
def rotary(head_dim: int, base: float, grid: Grid) -> RotaryEmbedding:
    """The rotary angles of this rank's positions, shared by all layers that turn alike."""
    return RotaryEmbedding(head_dim, 1.0, rotary_base=base, cp_group=grid.groups.cp)


@module.register
def _(op: Attention, site: Site) -> nn.Module:
    hidden = site.config.hidden_size
    config = site.with_(
        num_attention_heads=op.heads,
        num_query_groups=op.heads if op.kv_heads is None else op.kv_heads,
        kv_channels=hidden // op.heads if op.head_dim is None else op.head_dim,
        attention_dropout=op.dropout,
        add_bias_linear=op.bias,
    )
    return SelfAttention(op, site, config)


# ---- feed-forward -------------------------------------------------------------------


class FeedForward(mlp.MLP):
    """megatron-core's MLP as a function of one tensor, biases added."""

    def __init__(self, config: TransformerConfig, grid: Grid) -> None:
        super().__init__(config, LINEARS, ffn_hidden_size=config.ffn_hidden_size, tp_group=grid.groups.tp)

    def forward(self, x: Tensor) -> Tensor:
        y, bias = super().forward(x)
        return y if bias is None else y + bias


LINEARS = mlp.MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


@singledispatch
def feed_forward(op: Layer) -> dict[str, Any]:
    """The fields of megatron-core's configuration that say what an MLP computes."""
    raise UserError(f"no torch module is registered for {op} as an expert ({op.at})\nan expert can be SwiGLU or MLP")


@feed_forward.register
def _(op: MLP) -> dict[str, Any]:
    act = ACTIVATIONS[op.act]
    return {"ffn_hidden_size": op.ff, "activation_func": act, "gated_linear_unit": False, "add_bias_linear": op.bias}


@feed_forward.register
def _(op: SwiGLU) -> dict[str, Any]:
    return {
        "ffn_hidden_size": op.ff,
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "bias_activation_fusion": device.backend() == "nccl",  # one kernel; compiled, so not on CPU
    }


@module.register(MLP)
@module.register(SwiGLU)
def _(op: Layer, site: Site) -> nn.Module:
    return FeedForward(site.with_(**feed_forward(op)), site.grid)


class Mixture(moe_layer.MoELayer):
    """megatron-core's mixture of experts as a function of one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y, _ = super().forward(x)
        return y


class Router(TopKRouter):
    """megatron-core's router, its balancing loss weighted right under tp and cp.

    With a loss per token, gradients are divided by the tokens of all ranks; the balancing loss, a mean over the
    tokens of the tp-cp group, is multiplied beforehand by their number. megatron-core multiplies by this rank's.
    """

    def attach_and_log_load_balancing_loss(self, activation: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kwargs["valid_token_count"] = activation.shape[0] * self.tp_cp_group.size()
        return super().attach_and_log_load_balancing_loss(activation, *args, **kwargs)


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
    parts = moe_layer.MoESubmodules(experts=ModuleSpec(SequentialMLP, submodules=LINEARS), router=Router)
    made = Mixture(config, parts, pg_collection=site.grid.groups)
    for p in made.experts.parameters():
        # Experts have a grid of their own, and an optimizer of their own on any layout (megatron-core's layers say
        # so only when ep > 1, which is wrong under tp and names the optimizer's state by layout).
        p.allreduce = False  # type: ignore[attr-defined]
    return made.to(device.current())  # the router makes its weight on the CPU
