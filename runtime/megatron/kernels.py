"""Torch-native parts that megatron-core has only with Transformer Engine.

`Norm` works under sequence parallelism, `CoreAttention` under context parallelism; both run on any device. Tensors
are megatron-core's: [s, b, hidden], and [s, b, heads, head] in attention, s being the part of the sequence on this
rank.

Under context parallelism of n ranks the sequence is cut into 2n chunks, and rank r holds chunks r and 2n-1-r (see
`zigzag`), so that all have the same share of a causal mask.
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
from torch.nn.attention.bias import causal_lower_right

from . import device


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dim; its gradients are summed over the ranks that share a sequence."""

    def __init__(
        self, hidden: int, *, rms: bool, eps: float, bias: bool, sequence_parallel: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert not (rms and bias), "an RMSNorm has no bias"
        self.rms, self.eps = rms, eps
        self.weight = nn.Parameter(torch.ones(hidden, dtype=dtype, device=device.current()))
        self.bias = nn.Parameter(torch.zeros(hidden, dtype=dtype, device=device.current())) if bias else None
        for parameter in self.parameters():
            # What finalize_model_grads looks for: each rank has seen only its part of the sequence.
            parameter.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        if self.rms:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class CoreAttention(MegatronModule):
    """softmax(q k' · scale) v, causal or not, as megatron-core's attention layers call it.

    Keys and values may have fewer heads than the queries. Under context parallelism every rank gathers the keys and
    values of all (their gradients are reduce-scattered) and computes its own queries' rows.
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
        """[s, b, heads, head], and keys and values [s, b, kv_heads, head], to [s, b, heads · head]."""
        assert attention_mask is None and attention_bias is None and packed_seq_params is None
        causal = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}[attn_mask_type or self.mask_type]
        q = query.permute(1, 2, 0, 3)
        with self.random_state():
            if self.cp.size() > 1:
                out = self.over_ranks(q, key, value, causal)
            else:
                out = self.attend(q, key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), causal)
        return out.permute(2, 0, 1, 3).flatten(2)

    def over_ranks(self, q: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        """This rank's rows against the columns of all ranks; queries [b, heads, s, head], as is the result."""
        n, rank = self.cp.size(), self.cp.rank()
        both = torch.cat([key, value], -1)  # one collective instead of two
        both = tensor_parallel.gather_from_sequence_parallel_region(both, group=self.cp)
        both = natural(both, n) if causal else both
        k, v = both.permute(1, 2, 0, 3).split([key.shape[-1], value.shape[-1]], -1)
        if not causal:
            return self.attend(q, k, v, causal=False)
        chunk = q.shape[2] // 2
        # Chunk i attends to the first i + 1 chunks: two calls on their own prefixes do no more than they must.
        parts = zip(q.split(chunk, 2), (rank + 1, 2 * n - rank), strict=True)
        return torch.cat([self.attend(x, k[:, :, : m * chunk], v[:, :, : m * chunk], True) for x, m in parts], 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """The last query is the last key's; all [b, heads, s, head]."""
        square = q.shape[2] == k.shape[2]
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=causal_lower_right(q.shape[2], k.shape[2]) if causal and not square else None,
            is_causal=causal and square,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )

    def random_state(self) -> Any:
        """Each tensor-parallel rank drops from its own heads, so it draws from its own state."""
        draws_apart = self.training and self.dropout > 0 and self.tp.size() > 1
        return tensor_parallel.get_cuda_rng_tracker().fork() if draws_apart else nullcontext()


def zigzag(seq: int, cp: int, rank: int) -> Tensor:
    """The positions [seq / cp] of a sequence that context-parallel rank `rank` of `cp` holds, in its own order."""
    assert seq % (2 * cp) == 0, f"{2 * cp} chunks of a sequence of {seq}"
    chunks = torch.arange(seq).chunk(2 * cp)
    return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]]) if cp > 1 else torch.arange(seq)


def natural(x: Tensor, n: int) -> Tensor:
    """What n ranks hold in zigzag, one after the other along the first dim, in the sequence's own order."""
    chunks = x.unflatten(0, (n, 2, -1))
    return torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).flatten(0, 1)
