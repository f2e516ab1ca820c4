"""Attention in plain torch, with the scores of all pairs of tokens in memory at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megaloom.dsl import Attend, Value
from megaloom.dsl.ops.attention_core import sequence_dim

from .attention_scores import alibi_slopes, finish_scores
from .tensors import broadcast, einsum, names


def attention(
    op: Attend, out: Value, *args: Tensor, dropped: Callable[[Tensor, list[str]], Tensor] | None = None
) -> Tensor:
    """Return softmax(q kᵀ) v. dropped: dropout of the probabilities, a function of them and the names of their dims.

    The dims are [batch .., heads, queries, keys].
    """
    q, k, v, *others = args
    indices = [others.pop(-2), others.pop()] if op.documents else []
    rows, columns = (sequence_dim(a.shape).name for a in out.args[:2])
    renamed = {columns: "keys", "kv_heads": "heads"}  # key/value heads are repeated, one for each query head
    query = names(out.args[0].shape)
    key, value = ([renamed.get(n, n) for n in names(a.shape)] for a in out.args[1:3])
    heads = q.shape[query.index("heads")]
    k, v = (t.repeat_interleave(heads // t.shape[i := n.index("heads")], i) for t, n in ((k, key), (v, value)))
    score_dims = [*(n for n in query if n not in ("heads", rows, "head_dim")), "heads", rows, "keys"]
    scores = einsum(q, query, k, key, score_dims) * (
        q.shape[query.index("head_dim")] ** -0.5 if op.scale is None else op.scale
    )
    count = k.shape[key.index("keys")]
    offset = torch.arange(count, device=q.device) - torch.arange(scores.shape[-2], device=q.device)[:, None]
    other_document = None
    if indices:
        of_queries = broadcast(indices[0], out.args[-2].shape, score_dims)
        of_keys = broadcast(indices[1], ["batch", "keys"], score_dims)
        other_document = of_queries != of_keys
    slopes = alibi_slopes(heads) if op.alibi else None
    scores = finish_scores(op, scores, *others, offset=offset, slopes=slopes, other_document=other_document)
    weights = scores.softmax(-1)[..., :count]
    weights = weights if dropped is None else dropped(weights, score_dims)
    return einsum(weights, score_dims, v, value, names(out.shape))
