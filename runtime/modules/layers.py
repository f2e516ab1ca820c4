"""Torch modules of layers, built on megatron-core's. Each maps the inputs of its node to one tensor.

Hidden states are [seq, batch, embed], as in megatron-core. With sequence parallelism, each tensor-parallel rank holds
its part of seq between the matrix products. Parameters are allocated here; `BuiltNode.fill` sets their values.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import attention, mlp
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megaloom.dsl import (
    Attention,
    Rope,
    UserError,
    Value,
)
from megaloom.dsl.sharding_table import padded_vocabulary
from megaloom.planner.contract.engine_parts import EnginePart
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.build_context import BuildContext
from megaloom.runtime.megatron.fused_gradients import use_torch_products
from megaloom.runtime.megatron.kernels import CoreAttention, zigzag
from megaloom.runtime.megatron.padded_shards import mark_padded
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.ops.dropout_masks import MaskSource

from . import engine, fused

use_torch_products()
rope_utils.fused_apply_rotary_pos_emb = fused.apply_rope  # instead of Transformer Engine's, which may be missing

LINEARS = mlp.MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def linear_classes(context: BuildContext) -> tuple[type[nn.Module], type[nn.Module]]:
    """Return the classes of column- and row-parallel linear layers of a node's module."""
    return engine.narrow_linears() if EnginePart.LINEAR in context.engine else (ColumnParallelLinear, RowParallelLinear)


class Embedding(VocabParallelEmbedding):
    """Maps token ids [batch, seq] to hidden states. The table is padded as the plan says."""

    def __init__(self, table: Value, context: BuildContext) -> None:
        super().__init__(
            padded_vocabulary(table["vocab"].known, context.split),
            table["embed"].known,
            init_method=context.config.init_method,
            reduce_scatter_embeddings=context.config.sequence_parallel,
            config=context.config,
            tp_group=context.groups.collection.tp,
        )
        mark_padded(self.weight, 0)

    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        return x if self.reduce_scatter_embeddings else x.transpose(0, 1).contiguous()


class Logits(ColumnParallelLinear):
    """Maps hidden states to this rank's columns of the logits [seq, batch, vocab / tp].

    Columns that pad the vocabulary get the lowest finite value, so that their probability is zero.
    """

    def __init__(self, table: Value, bias: bool, context: BuildContext) -> None:
        vocab, tp = table["vocab"].known, context.groups.layout.tp
        columns = padded_vocabulary(vocab, context.split) // tp
        super().__init__(
            table["embed"].known,
            columns * tp,
            config=context.config,
            init_method=context.config.init_method,
            bias=bias,
            gather_output=False,
            tp_group=context.groups.collection.tp,
        )
        self.vocab_columns = max(0, min(columns, vocab - context.groups.tp_rank * columns))
        for p in self.parameters():
            mark_padded(p, 0)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = super().forward(x)
        if self.vocab_columns < y.shape[-1]:
            y[..., self.vocab_columns :] = torch.finfo(y.dtype).min
        return y


class LearnedPositions(nn.Module):
    """Adds row i + offset of a table to position i. Each rank adds the rows of its own positions."""

    def __init__(self, table: Value, offset: int, context: BuildContext) -> None:
        super().__init__()
        rows, layout = table["position"].known - offset, context.groups.layout
        if context.seq > rows:
            raise UserError(
                f"--seq {context.seq} is longer than the model's {rows} learned positions ({table.at})\n"
                f"use --seq {rows} or less"
            )
        positions = local_positions(context)
        self.register_buffer("table_rows", positions.to(device.current()) + offset, persistent=False)
        values = torch.empty(
            rows + offset, table["embed"].known, dtype=context.config.params_dtype, device=device.current()
        )
        self.weight = nn.Parameter(values)
        # finalize_model_grads reads this: each rank has seen only its part of the sequence.
        self.weight.sequence_parallel = layout.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return x + F.embedding(self.table_rows, self.weight)[:, None]


class HiddenDropout(nn.Module):
    """Dropout of hidden states [seq, batch, embed]. Its mask does not depend on the layout."""

    def __init__(self, rate: float, embed: int, context: BuildContext) -> None:
        super().__init__()
        self.rate = rate
        positions = local_positions(context).to(device.current())
        self.register_buffer("positions", positions[:, None, None], persistent=False)
        self.register_buffer("channels", torch.arange(embed, device=device.current()), persistent=False)

    def forward(self, x: Tensor, *, masks: MaskSource) -> Tensor:
        if not (self.training and self.rate):
            return x
        first_sample = torch.full((), masks.first_sample, device=x.device)
        rows = fused.hidden_rows(masks.key(0, x.device), first_sample, x.shape[1], self.positions)
        return fused.drop(x, rows, self.channels, self.rate)


def local_positions(context: BuildContext) -> Tensor:
    """Return the positions in the sequence of the hidden states that this rank has between layers."""
    layout, groups = context.groups.layout, context.groups
    positions = zigzag(context.seq, layout.cp, groups.cp_rank)
    return positions.chunk(layout.tp)[groups.tp_rank] if layout.sequence_parallel else positions


class Sum(nn.Module):
    """Sum of two or more tensors, as in a residual."""

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return sum(others, start=x)


class SelfAttention(attention.SelfAttention):
    """megatron-core's self-attention, with biases added. `norms` are those of queries and keys, or empty."""

    def __init__(
        self, op: Attention, context: BuildContext, config: TransformerConfig, norms: tuple[nn.Module, ...]
    ) -> None:
        # megatron-core 0.18 and later make Transformer Engine's norms of queries and keys unless there are others.
        core = engine.engine_attention() if EnginePart.ATTENTION in context.engine else CoreAttention
        column, row = linear_classes(context)
        parts = attention.SelfAttentionSubmodules(column, core, row, q_layernorm=IdentityOp, k_layernorm=IdentityOp)
        mask = AttnMaskType.causal if op.causal else AttnMaskType.no_mask
        super().__init__(config, parts, 1, mask, pg_collection=context.groups.collection)
        self.q_layernorm, self.k_layernorm = norms or (None, None)
        rope = rope_of(op)
        self.angles = None if rope is None else rotary_angles(config.kv_channels, rope, context.groups)
        self.seq = context.seq

    def forward(self, x: Tensor) -> Tensor:
        angles = None if self.angles is None else self.angles(self.seq)
        y, bias = super().forward(x, None, rotary_pos_emb=angles)
        return y if bias is None else y + bias


def rope_of(op: Attention) -> Rope | None:
    """Return the RoPE of an attention layer, or None."""
    return op.rope if op.rope is None or isinstance(op.rope, Rope) else Rope(op.rope)


@cache
def rotary_angles(head_dim: int, rope: Rope, groups: ProcessGroups) -> RotaryEmbedding:
    """Return the rotary angles of this rank's positions. Layers with equal RoPE share them."""
    channels = head_dim if rope.channels is None else rope.channels
    angles = RotaryEmbedding(channels, 1.0, rotary_interleaved=rope.interleaved, cp_group=groups.collection.cp)
    angles.inv_freq = torch.tensor(rope.frequencies(channels), dtype=torch.float32, device=device.current())
    return angles


class FeedForward(mlp.MLP):
    """megatron-core's MLP, with biases added."""

    def __init__(self, context: BuildContext, config: TransformerConfig) -> None:
        column, row = linear_classes(context)
        linears = mlp.MLPSubmodules(linear_fc1=column, linear_fc2=row)
        super().__init__(config, linears, ffn_hidden_size=config.ffn_hidden_size, tp_group=context.groups.collection.tp)

    def forward(self, x: Tensor) -> Tensor:
        y, bias = super().forward(x)
        return y if bias is None else y + bias
