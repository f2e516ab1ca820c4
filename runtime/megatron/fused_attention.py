"""Attention by torch's fused kernel. It needs no megatron-core, so that tests of one process can import it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right


def fused_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, dropout: float = 0.0) -> Tensor:
    """Attend by torch's fused kernel; the last query is at the last key. All tensors are [b, heads, s, head_dim]."""
    square = q.shape[2] == k.shape[2]
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=causal_lower_right(q.shape[2], k.shape[2]) if causal and not square else None,
        is_causal=causal and square,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
