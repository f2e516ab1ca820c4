"""Attention with windows, soft caps, ALiBi, relative biases and sinks by torch's FlexAttention.

On GPUs it is one fused kernel. Masks skip blocks of 128 x 128 scores that no query reads. Sinks take their share of the
probabilities through the log-sum-exp of the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megaloom.dsl import Attend
from megaloom.planner.contract.attention_blocks import visible_keys
from megaloom.runtime.megatron import device

from .attention_scores import HeadScores, bucket_indices

MASK_BLOCK = 128  # queries and keys of a block of the mask
# For fewer than 128 queries torch takes a kernel of decoding, which refuses masks of the chunks of context parallelism.
PREFILL = {"FORCE_USE_FLEX_ATTENTION": True}

Documents = tuple[Tensor, Tensor]  # document indices of queries [b, rows] and of keys [b, keys]


def attend_by_flex(
    of_heads: HeadScores, q: Tensor, k: Tensor, v: Tensor, positions: range, documents: Documents | None
) -> Tensor:
    """Return attention of queries [b, heads, rows, c] at these positions to keys and values [b, kv_heads, keys, c]."""
    op = of_heads.op
    keys = visible_keys(op, positions, k.shape[2])
    keys = range(keys.start // MASK_BLOCK * MASK_BLOCK, keys.stop)
    found = _kernel()(
        q,
        k[:, :, keys.start : keys.stop],
        v[:, :, keys.start : keys.stop],
        score_mod=_score_change(of_heads, positions, keys, q),
        block_mask=_block_mask(op, positions, keys, documents, q.device),
        scale=op.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_lse=op.sink,
        kernel_options=PREFILL,
    )
    if not op.sink:
        return found  # type: ignore[no-any-return]
    out, log_sum = found
    share = torch.sigmoid(log_sum - of_heads.others[0].float()[:, None])  # of the keys; the sink has the rest
    return out * share.to(out.dtype)[..., None]  # type: ignore[no-any-return]


@cache
def _kernel() -> Callable[..., Any]:
    """Return FlexAttention, compiled for fixed shapes on GPUs. Elsewhere it has no backward pass."""
    if not device.gpu_count():
        return flex_attention
    torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)  # kinds of layers and shapes
    return torch.compile(flex_attention, dynamic=False)


def _block_mask(
    op: Attend, positions: range, keys: range, documents: Documents | None, where: torch.device
) -> BlockMask | None:
    """Return the mask of a causal core, of one in documents, or of both; None if every query reads every key."""
    first = keys.start - positions.start
    if documents is None:
        return _mask(op.window, len(positions), len(keys), first, where) if op.causal else None
    of_queries, of_keys = documents[0], documents[1][:, keys.start : keys.stop]
    in_order = _visible(op.window, first) if op.causal else None

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = of_queries[batch, query] == of_keys[batch, key]
        return same if in_order is None else same & in_order(batch, head, query, key)

    sizes = len(of_queries), None, len(positions), len(keys)
    return create_block_mask(visible, *sizes, device=where, BLOCK_SIZE=MASK_BLOCK, _compile=where.type == "cuda")


@lru_cache(maxsize=64)
def _mask(window: int | None, queries: int, keys: int, first: int, where: torch.device) -> BlockMask:
    """Return a causal mask, whose first key is `first` positions after the first query."""

    sizes = None, None, queries, keys
    return create_block_mask(
        _visible(window, first), *sizes, device=where, BLOCK_SIZE=MASK_BLOCK, _compile=where.type == "cuda"
    )


def _visible(window: int | None, first: int) -> Callable[..., Tensor]:
    """Return whether a query reads a key of a causal core, by their indices."""

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query - key - first
        return distance >= 0 if window is None else (distance >= 0) & (distance < window)

    return visible


def _score_change(of_heads: HeadScores, queries: range, keys: range, q: Tensor) -> Callable[..., Tensor] | None:
    """Return what changes the score of a query and a key, by their indices; None if nothing does."""
    op, slopes = of_heads.op, of_heads.slopes
    first, bias = keys.start - queries.start, None
    if op.relative is not None:  # a bias for each head and distance, from the least distance on
        distances = torch.arange(keys.start - queries.stop + 1, keys.stop - queries.start, device=q.device)
        bias = of_heads.others[-1][bucket_indices(distances, op.relative)].T.contiguous()
    if op.softcap is None and slopes is None and bias is None:
        return None
    softcap, last = op.softcap, len(queries) - 1

    def change(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score + slopes[head] * (key - query + first)
        if bias is not None:
            score = score + bias[head, key - query + last]
        return score

    return change
