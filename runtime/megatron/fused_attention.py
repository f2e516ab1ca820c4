"""Attention by torch's fused kernels. It needs no megatron-core, so that tests of one process can import it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

CUDNN_DEVICES = (9, 10)  # major compute capabilities on which cuDNN's attention is the fastest
CUDNN_TILE = 128  # releases of cuDNN before 9.15.1 fail on other lengths than its multiples (pytorch/pytorch#169849)
CUDNN_ANY_LENGTH = 91501
ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def fused_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, dropout: float = 0.0) -> Tensor:
    """Attend by torch's fused kernel; the last query is at the last key. All tensors are [b, heads, s, head_dim]."""
    square = q.shape[2] == k.shape[2]
    with preferred_kernel(q, k):
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


def preferred_kernel(q: Tensor, k: Tensor) -> AbstractContextManager[None]:
    """Return a context in which torch takes cuDNN's kernel first, if it is the fastest and right for these lengths.

    torch 2.11 takes it first by itself, but not in a process that can import Transformer Engine, as profiles on an H200
    show. Its other kernels are slow for heads of keys and of values that differ, as in latent attention.
    """
    if not q.is_cuda or _major(q.device) not in CUDNN_DEVICES:
        return nullcontext()
    tiled = q.shape[2] % CUDNN_TILE == 0 and k.shape[2] % CUDNN_TILE == 0
    right = tiled or (torch.backends.cudnn.version() or 0) >= CUDNN_ANY_LENGTH
    return sdpa_kernel(ORDER, set_priority=True) if right else nullcontext()


@cache
def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]
