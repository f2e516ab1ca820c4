"""The attention core of a body, on the queries and heads of one rank.

`attend` runs the kernel that `capability` names. No kernel stores scores for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megaloom.dsl import Attend, Shape, Value
from megaloom.dsl.ops.attention_core import sequence_dim
from megaloom.planner.contract.attention_blocks import query_blocks
from megaloom.planner.contract.capability import AttentionKernel
from megaloom.runtime.megatron.fused_attention import fused_attention

from .attention_scores import HeadScores, alibi_slopes
from .dropout_masks import MaskSource
from .flex_attention import Documents, attend_by_flex
from .tensors import broadcast

DropBlock = Callable[[Tensor], Tensor]
"""Dropout of the probabilities of a block."""


@frozen
class LocalQueries:
    """The shard of the queries that a rank has.

    ranges: their positions in the sequence, in order. first_head: the first of their heads; heads: heads of all ranks.
    """

    ranges: tuple[range, ...]
    first_head: int
    heads: int


@frozen
class ScoreDropout:
    """Dropout of attention probabilities, by the global position of each."""

    masks: MaskSource
    rate: float
    number: int  # of the dropout in its node
    local: LocalQueries

    def __call__(self, weights: Tensor, queries: range, keys: range) -> Tensor:
        """Return the probabilities [b, heads, queries, keys] after dropout."""
        heads = range(self.local.first_head, self.local.first_head + weights.shape[1])
        samples = self.masks.samples(weights.shape[0], weights.device)
        positions = (_positions(at, weights) for at in (heads, queries, keys))
        return self.masks.drop(weights, self.rate, self.number, samples, *positions)


def attend(
    kernel: AttentionKernel, out: Value, *args: Tensor, local: LocalQueries, dropped: ScoreDropout | None = None
) -> Tensor:
    """Return attention of a rank's queries to all keys: a tensor with the dims of `out`."""
    op = out.op
    assert isinstance(op, Attend)
    others = args[3:-2] if op.documents else args[3:]
    queries = out.args[0].shape
    orders = [heads_first(a.shape, queries) for a in out.args[:3]]
    q, k, v = (broadcast(t, a.shape, order) for t, a, order in zip(args, out.args, orders, strict=False))
    outer, (q, k, v) = q.shape[:-3], (t.reshape(-1, *t.shape[-3:]) for t in (q, k, v))
    lengths = [len(positions) for positions in local.ranges]
    documents: list[Documents | None] = [None for _ in lengths]
    if op.documents:  # of each part of the queries, [b, part], with those of all keys, [b, keys]
        documents = [(part, args[-1]) for part in args[-2].split(lengths, 1)]
    parts = zip(q.split(lengths, 2), local.ranges, documents, strict=True)
    if kernel is AttentionKernel.TORCH:
        found = [_fused(op, x, k, v, at) for x, at, _ in parts]
    else:
        assert kernel in (AttentionKernel.FLEX, AttentionKernel.BLOCKS), f"a body has no {kernel}"
        slopes = alibi_slopes(local.heads)[local.first_head :][: q.shape[1]].to(q.device) if op.alibi else None
        of_heads = HeadScores(op, others, slopes)
        if kernel is AttentionKernel.FLEX:
            found = [attend_by_flex(of_heads, x, k, v, at, each) for x, at, each in parts]
        else:
            found = [y for x, at, each in parts for y in _in_blocks(of_heads, dropped, x, k, v, at, each)]
    y = found[0] if len(found) == 1 else torch.cat(found, 2)
    return broadcast(y.view(*outer, *y.shape[1:]), orders[0], out.shape)


def heads_first(shape: Shape, queries: Shape) -> list[str]:
    """Return the names of the dims of queries, keys or values in the order [.., heads, positions, channels]."""
    last = ["kv_heads" if "kv_heads" in shape else "heads", sequence_dim(shape).name, "head_dim"]
    return [*(d.name for d in queries if d.name in shape and d.name not in last), *last]


def _fused(op: Attend, q: Tensor, k: Tensor, v: Tensor, positions: range) -> Tensor:
    keys = positions.stop if op.causal else k.shape[2]
    return fused_attention(q, k[:, :, :keys], v[:, :, :keys], op.causal, op.scale)


def _in_blocks(
    of_heads: HeadScores,
    dropped: ScoreDropout | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: range,
    documents: Documents | None,
) -> Iterator[Tensor]:
    """Yield the outputs of blocks of queries. Each reads the keys that its mask shows, and recomputes its scores."""
    for at, keys in query_blocks(of_heads.op, positions, q.shape[0] * q.shape[1], k.shape[2]):
        part, shown = slice(at.start - positions.start, at.stop - positions.start), slice(keys.start, keys.stop)
        own = None if documents is None else (documents[0][:, part], documents[1][:, shown])
        drop = None if dropped is None else partial(dropped, queries=at, keys=keys)
        run = partial(_attend_ranges, of_heads, at, keys, own, drop)
        args = q[:, :, part], k[:, :, shown], v[:, :, shown], *of_heads.others
        if torch.is_grad_enabled():
            yield checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
        else:
            yield run(*args)


def _attend_ranges(
    of_heads: HeadScores,
    queries: range,
    keys: range,
    documents: Documents | None,
    drop: DropBlock | None,
    *args: Tensor,
) -> Tensor:
    """Return attention of queries to keys in consecutive positions of the sequence.

    args: what the checkpoint saves, which are queries, keys, values, and the other weights of the op.
    """
    offset = _positions(keys, args[0]) - _positions(queries, args[0])[:, None]
    return attend_block(evolve(of_heads, others=args[3:]), args[:3], offset, documents, drop)


def attend_block(
    of_heads: HeadScores,
    qkv: Sequence[Tensor],
    offset: Tensor,
    documents: Documents | None,
    drop: DropBlock | None = None,
) -> Tensor:
    """Return attention of queries [b, heads, rows, c] to keys and values [b, kv_heads, keys, c].

    offset: the position of each key minus that of each query, [rows, keys]. drop: the dropout of probabilities.
    """
    q, k, v = qkv
    batch, heads, rows, channels = q.shape
    shared = (batch, k.shape[1], -1)  # heads that read one key head follow one another
    scaled = q * (channels**-0.5 if of_heads.op.scale is None else of_heads.op.scale)
    scores = scaled.reshape(*shared, channels) @ k.transpose(-1, -2)
    scores, other = scores.view(batch, heads, rows, -1), None
    if documents is not None:
        other = (documents[0][:, :, None] != documents[1][:, None])[:, None]
    weights = of_heads.finish(scores, offset, other).softmax(-1)[..., : k.shape[2]]
    weights = weights if drop is None else drop(weights)
    return (weights.reshape(*shared, k.shape[2]) @ v).view(batch, heads, rows, -1)


def _positions(positions: range, like: Tensor) -> Tensor:
    return torch.arange(positions.start, positions.stop, device=like.device)
