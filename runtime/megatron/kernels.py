"""Torch-native norm and core attention, which megatron-core has only with Transformer Engine.

`Norm` supports sequence parallelism, `CoreAttention` context parallelism, on any device. Shapes are megatron-core's:
[s, b, hidden], in attention [s, b, heads, head_dim], where s is this rank's part of the sequence.

With context parallelism over n ranks the sequence has 2n chunks, and rank r holds chunks r and 2n-1-r (`zigzag`), so
that every rank has an equal share of a causal mask.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from . import device
from .fused_attention import fused_attention


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dim. Its gradients are summed over the ranks that share a sequence."""

    def __init__(
        self, hidden: int, *, rms: bool, eps: float, bias: bool, sequence_parallel: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert not (rms and bias), "an RMSNorm has no bias"
        self.rms, self.eps = rms, eps
        self.weight = nn.Parameter(torch.ones(hidden, dtype=dtype, device=device.current()))
        self.bias = nn.Parameter(torch.zeros(hidden, dtype=dtype, device=device.current())) if bias else None
        for parameter in self.parameters():
            # finalize_model_grads reads this: each rank has seen only its part of the sequence.
            parameter.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        if self.rms:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class CoreAttention(MegatronModule):
    """softmax(q kᵀ · scale) v, causal or not, with the interface that megatron-core's attention layers call.

    Keys and values may have fewer heads than queries. With context parallelism, every rank gathers all keys and values
    (their gradients are reduce-scattered) and computes the rows of its own queries.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config)
        assert attention_type == "self", "queries, keys and values come from one sequence"
        assert config.window_size is None and config.softmax_type == "vanilla", "no windows, no sinks"
        self.mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale
        self.tp, self.cp = pg_collection.tp, pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        /,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend from queries [s, b, heads, head_dim] to keys and values [s, b, kv_heads, head_dim].

        Return [s, b, heads · head_dim].
        """
        assert attention_mask is None and attention_bias is None and packed_seq_params is None
        causal = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}[attn_mask_type or self.mask_type]
        q = query.permute(1, 2, 0, 3)
        with self.random_state():
            if self.cp.size() > 1:
                out = self.attend_over_ranks(q, key, value, causal)
            else:
                out = self.attend(q, key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), causal)
        return out.permute(2, 0, 1, 3).flatten(2)

    def attend_over_ranks(self, q: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        """Attend from this rank's queries [b, heads, s, head_dim] to the keys of all ranks."""
        n, rank = self.cp.size(), self.cp.rank()
        joined = torch.cat([key, value], -1)  # one collective instead of two
        joined = tensor_parallel.gather_from_sequence_parallel_region(joined, group=self.cp)
        joined = from_zigzag(joined, n) if causal else joined
        k, v = joined.permute(1, 2, 0, 3).split([key.shape[-1], value.shape[-1]], -1)
        if not causal:
            return self.attend(q, k, v, causal=False)
        chunk = q.shape[2] // 2
        # Chunk i attends to the first i + 1 chunks. One call per chunk, on its own prefix, computes no masked blocks.
        parts = zip(q.split(chunk, 2), (rank + 1, 2 * n - rank), strict=True)
        return torch.cat([self.attend(x, k[:, :, : m * chunk], v[:, :, : m * chunk], True) for x, m in parts], 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """Attend; the last query is at the last key. All tensors are [b, heads, s, head_dim]."""
        return fused_attention(q, k, v, causal, self.scale, self.dropout if self.training else 0.0)

    def random_state(self) -> Any:
        """Return the RNG context of attention dropout: tensor-parallel ranks draw for different heads."""
        own_state = self.training and self.dropout > 0 and self.tp.size() > 1
        return tensor_parallel.get_cuda_rng_tracker().fork() if own_state else nullcontext()


def zigzag(seq: int, cp: int, rank: int) -> Tensor:
    """Return the positions [seq / cp] that a context-parallel rank holds, in its order."""
    if cp == 1:
        return torch.arange(seq)
    assert seq % (2 * cp) == 0, f"{2 * cp} chunks of a sequence of {seq}"
    chunks = torch.arange(seq).chunk(2 * cp)
    return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])


def zigzag_part(x: Tensor, dim: int, cp: int, rank: int) -> Tensor:
    """Return the positions along a dim that a context-parallel rank holds, in its order."""
    if cp == 1:
        return x
    assert x.shape[dim] % (2 * cp) == 0, f"{2 * cp} chunks of a sequence of {x.shape[dim]}"
    chunks = x.chunk(2 * cp, dim)
    return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]], dim)


def from_zigzag(x: Tensor, n: int) -> Tensor:
    """Return the tokens of n zigzag ranks, concatenated along the first dim, in sequence order."""
    chunks = x.unflatten(0, (n, 2, -1))
    return torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).flatten(0, 1)
