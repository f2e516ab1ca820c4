"""The torch modules of the layers: megatron-core's own, each as a function of its node's inputs to one tensor.

Hidden states are [seq, batch, embed] (megatron-core's order); under sequence parallelism each tensor-parallel rank
holds its share of seq between the matrix products. Parameters are allocated, not filled.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import attention, mlp
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megaloom.dsl import (
    Attention,
    Rope,
    UserError,
    Value,
)
from megaloom.dsl.sharding_table import SHARDING
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.build_context import BuildContext
from megaloom.runtime.megatron.kernels import CoreAttention, zigzag
from megaloom.runtime.megatron.process_groups import ProcessGroups

from . import fused

if rope_utils.fused_apply_rotary_pos_emb is None:  # it comes with Transformer Engine alone
    rope_utils.fused_apply_rotary_pos_emb = fused.turned

LINEARS = mlp.MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


class Embedding(VocabParallelEmbedding):
    """Token ids [batch, seq] → hidden states; the table is padded to divide by tp."""

    def __init__(self, table: Value, context: BuildContext) -> None:
        super().__init__(
            SHARDING["vocab"].physical(table["vocab"].known, context.groups.layout.tp),
            table["embed"].known,
            init_method=context.config.init_method,
            reduce_scatter_embeddings=context.config.sequence_parallel,
            config=context.config,
            tp_group=context.groups.collection.tp,
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        return x if self.reduce_scatter_embeddings else x.transpose(0, 1).contiguous()


class Logits(ColumnParallelLinear):
    """Hidden states → this rank's columns of the logits [seq, batch, vocab / tp].

    The columns that only pad the vocabulary get the lowest value there is, so that no probability goes to them.
    """

    def __init__(self, table: Value, bias: bool, context: BuildContext) -> None:
        vocab, tp = table["vocab"].known, context.groups.layout.tp
        columns = SHARDING["vocab"].local(vocab, tp)
        super().__init__(
            table["embed"].known,
            columns * tp,
            config=context.config,
            init_method=context.config.init_method,
            bias=bias,
            gather_output=False,
            tp_group=context.groups.collection.tp,
        )
        self.real = max(0, min(columns, vocab - context.groups.tp_rank * columns))

    def forward(self, x: Tensor) -> Tensor:
        y, _ = super().forward(x)
        if self.real < y.shape[-1]:
            y[..., self.real :] = torch.finfo(y.dtype).min
        return y


class LearnedPositions(nn.Module):
    """Add row i + offset of a table to position i; each rank adds the rows of the positions it holds."""

    def __init__(self, table: Value, offset: int, context: BuildContext) -> None:
        super().__init__()
        rows, layout = table["position"].known - offset, context.groups.layout
        if context.seq > rows:
            raise UserError(
                f"sequences of {context.seq} tokens need as many learned positions; the model has {rows} ({table.at})\n"
                f"a seq of up to {rows} would work"
            )
        where = zigzag(context.seq, layout.cp, context.groups.cp_rank)
        if layout.sequence_parallel:
            where = where.chunk(layout.tp)[context.groups.tp_rank]
        self.register_buffer("where", where.to(device.current()) + offset, persistent=False)
        values = torch.empty(
            rows + offset, table["embed"].known, dtype=context.config.params_dtype, device=device.current()
        )
        self.weight = nn.Parameter(values)
        # What finalize_model_grads looks for: each rank has seen only its part of the sequence.
        self.weight.sequence_parallel = layout.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return x + F.embedding(self.where, self.weight)[:, None]


class Drop(nn.Module):
    """Dropout of hidden states; under sequence parallelism each rank draws for its own share."""

    def __init__(self, rate: float, context: BuildContext) -> None:
        super().__init__()
        self.rate, self.parallel = rate, context.config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        with tensor_parallel.get_cuda_rng_tracker().fork() if self.parallel else nullcontext():
            return F.dropout(x, self.rate, self.training)


class Sum(nn.Module):
    """The residual's addition, of two or more."""

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return sum(others, start=x)


class SelfAttention(attention.SelfAttention):
    """megatron-core's self-attention, biases added; norms are of queries and of keys, or neither."""

    def __init__(
        self, op: Attention, context: BuildContext, config: TransformerConfig, norms: tuple[nn.Module, ...]
    ) -> None:
        parts = attention.SelfAttentionSubmodules(ColumnParallelLinear, CoreAttention, RowParallelLinear)
        mask = AttnMaskType.causal if op.causal else AttnMaskType.no_mask
        super().__init__(config, parts, 1, mask, pg_collection=context.groups.collection)
        if norms:
            self.q_layernorm, self.k_layernorm = norms
        turn = turning(op)
        self.angles = None if turn is None else rotary(config.kv_channels, turn, context.groups)
        self.seq = context.seq

    def forward(self, x: Tensor) -> Tensor:
        angles = None if self.angles is None else self.angles(self.seq)
        y, bias = super().forward(x, None, rotary_pos_emb=angles)
        return y if bias is None else y + bias


def turning(op: Attention) -> Rope | None:
    """How the positions of an attention turn, if they do."""
    return op.rope if op.rope is None or isinstance(op.rope, Rope) else Rope(op.rope)


@cache
def rotary(head_dim: int, rope: Rope, groups: ProcessGroups) -> RotaryEmbedding:
    """The rotary angles of this rank's positions, shared by all layers that turn alike."""
    channels = head_dim if rope.channels is None else rope.channels
    made = RotaryEmbedding(channels, 1.0, rotary_interleaved=rope.interleaved, cp_group=groups.collection.cp)
    made.inv_freq = torch.tensor(rope.frequencies(channels), dtype=torch.float32, device=device.current())
    return made


class FeedForward(mlp.MLP):
    """megatron-core's MLP, biases added."""

    def __init__(self, context: BuildContext, config: TransformerConfig) -> None:
        super().__init__(config, LINEARS, ffn_hidden_size=config.ffn_hidden_size, tp_group=context.groups.collection.tp)

    def forward(self, x: Tensor) -> Tensor:
        y, bias = super().forward(x)
        return y if bias is None else y + bias
