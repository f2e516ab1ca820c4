"""Attention: of whole tensors, with the scores of all pairs of tokens in memory; of shards, by a kernel; of one query.

Decoding keeps the keys and values of earlier positions, and attends the query of the newest position of each row to
them, or to an encoder's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import cast

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from megaloom.dsl import Attend, Value
from megaloom.dsl.ops.attention_core import sequence_dim
from megaloom.planner.contract.attention_blocks import local_ranges
from megaloom.planner.contract.capability import AttentionKernel, is_plain_attention
from megaloom.planner.contract.choices import Module

from .attention_kernels import LocalQueries, ScoreDropout, attend, attend_block, heads_first
from .attention_scores import HeadScores, alibi_slopes
from .kv_cache import KVCache, OpState, Rows
from .local_op import LocalOp, TensorFunction
from .registry import NextPosition, first_state, local, next_position, whole
from .tensors import broadcast, dim_index, einsum, names


@whole.register
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
    of_heads = HeadScores(op, tuple(others), alibi_slopes(heads) if op.alibi else None)
    scores = of_heads.finish(scores, offset, other_document)
    weights = scores.softmax(-1)[..., :count]
    weights = weights if dropped is None else dropped(weights, score_dims)
    return einsum(weights, score_dims, v, value, names(out.shape))


@local.register
def _(op: Attend, here: LocalOp) -> TensorFunction:
    return partial(_of_shard, op, here)


def _of_shard(op: Attend, here: LocalOp, *args: Tensor) -> Tensor:
    """Return the attention of this rank's queries."""
    kernel, queries = cast(AttentionKernel, here.kernel), local_queries(here, args[0])
    dropped = ScoreDropout(here.masks, op.dropout, here.dropout, queries) if op.dropout and here.masks else None
    run = partial(attend, kernel, here.out, local=queries, dropped=dropped)
    recompute = kernel.fused and Module.CORE_ATTN in here.groups.layout.recomputed_modules
    return here.recomputed(run, *args) if recompute else run(*args)


def local_queries(here: LocalOp, q: Tensor) -> LocalQueries:
    """Return the positions and heads of this rank's queries."""
    shape, groups = here.out.args[0].shape, here.groups
    count, heads = (q.shape[dim_index(shape, name)] for name in (sequence_dim(shape).name, "heads"))
    cp = groups.layout.cp if "cp" in here.placed.sharded_axes else 1
    tp = groups.layout.tp if here.axis("heads") == "tp" else 1
    return LocalQueries(
        ranges=local_ranges(count, cp, groups.cp_rank if cp > 1 else 0),
        first_head=heads * groups.tp_rank if tp > 1 else 0,
        heads=heads * tp,
    )


@first_state.register
def _(op: Attend, out: Value, args: tuple[Tensor, ...]) -> OpState | None:
    queries, keys = (sequence_dim(a.shape).name for a in out.args[:2])
    if queries != keys:
        return None  # it reads an encoder's output, which is computed once
    orders = (heads_first(a.shape, out.args[0].shape) for a in out.args[1:3])
    k, v = (broadcast(x, a.shape, order) for x, a, order in zip(args[1:3], out.args[1:3], orders, strict=True))
    return KVCache.of(k, v, window=op.window)


@next_position.register
def _(op: Attend, here: LocalOp) -> NextPosition:
    # All columns of a KV cache are in the window, and all tokens are of one document.
    plain = is_plain_attention(evolve(op, documents=False, dropout=0.0, window=None))
    orders = tuple(tuple(heads_first(a.shape, here.out.args[0].shape)) for a in here.out.args[:3])
    return NewQuery(here, op, plain, orders)


@frozen(eq=False)
class NewQuery:
    """An attention of one query of each row. orders: of the dims of queries, keys and values, as it computes."""

    here: LocalOp
    op: Attend
    plain: bool
    orders: tuple[tuple[str, ...], ...]

    def __call__(self, rows: Rows, state: OpState | None, args: tuple[Tensor, ...]) -> Tensor:
        """Return the attention of the newest position. Without a state it reads an encoder's output."""
        return self.to_cache(rows, state, args) if isinstance(state, KVCache) else self.to_source(rows, args)

    def to_cache(self, rows: Rows, cache: KVCache, args: tuple[Tensor, ...]) -> Tensor:
        """Add the keys and values of the newest position, and return its attention to all columns of the cache."""
        q, k, w = self._ordered(args)
        capacity, where = cache.capacity, q.device
        index = rows.once(("index", capacity), lambda: rows.newest % capacity)
        cache.write(index, k, w)
        # At index i is the column newest - (newest - i) % capacity; it is negative if there is none yet.
        indices = rows.once(("indices", capacity), lambda: torch.arange(capacity, device=where))
        offset = rows.once(("offset", capacity), lambda: -((index - indices) % capacity)[None])
        hidden = rows.once(("hidden", capacity), lambda: rows.newest + offset < rows.padding[:, None])
        return self._attend(rows, args, (q, *cache.buffers), offset, hidden)

    def to_source(self, rows: Rows, args: tuple[Tensor, ...]) -> Tensor:
        """Return the attention of the newest position to another sequence, which ends early for shorter sources."""
        qkv, lengths = self._ordered(args), rows.source_lengths
        count, hidden = qkv[1].shape[2], None
        positions = rows.once(("source", count), lambda: torch.arange(count, device=qkv[0].device)[None])
        if lengths is not None and rows.least_source < count:
            hidden = rows.once(("ended", count), lambda: positions >= lengths[:, None])
        return self._attend(rows, args, qkv, positions, hidden)

    def _ordered(self, args: tuple[Tensor, ...]) -> list[Tensor]:
        """Return queries, keys and values in the order of computation."""
        pairs = zip(args, self.here.out.args, self.orders, strict=False)
        return [broadcast(x, a.shape, order) for x, a, order in pairs]

    def _attend(
        self, rows: Rows, args: tuple[Tensor, ...], qkv: Sequence[Tensor], offset: Tensor, hidden: Tensor | None
    ) -> Tensor:
        """Return the attention. offset: positions of the keys minus that of the query, [1, columns].

        hidden: True where a row does not read a column, [rows, columns].
        """
        q, k, w = qkv
        if self.plain:
            # The heads that read one key head follow one another, so they are computed as queries of one head.
            grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
            mask = None if hidden is None else rows.once((id(hidden), q.dtype), partial(_mask, hidden, q.dtype))
            y = F.scaled_dot_product_attention(grouped, k, w, mask, scale=self.op.scale).reshape(*q.shape[:3], -1)
        else:
            slopes, documents = None, None if hidden is None else (torch.zeros_like(hidden[:, :1]), hidden)
            if self.op.alibi:
                local = local_queries(self.here, args[0])
                slopes = _slopes(local.heads, q.device)[local.first_head :][: q.shape[1]]
            of_heads = HeadScores(self.op, args[3:-2] if self.op.documents else args[3:], slopes)
            y = attend_block(of_heads, (q, k, w), offset, documents)
        return broadcast(y, self.orders[0], self.here.out.shape)


def _mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores, [rows, 1, 1, columns]: -inf where a column is hidden."""
    return torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, -torch.inf)[:, None, None]


@lru_cache(maxsize=32)
def _slopes(heads: int, device: torch.device) -> Tensor:
    return alibi_slopes(heads).to(device)
