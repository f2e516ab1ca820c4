"""Attention of the newest position of each row to the keys and values that are kept, or to an encoder's output."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from megaloom.dsl import Attend, Value
from megaloom.dsl.facts.placement import PlacedOp
from megaloom.planner.contract.capability import is_plain_attention
from megaloom.runtime.body.attention import attend_block, heads_first
from megaloom.runtime.body.local_ops import local_queries
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.reference.attention_scores import alibi_slopes
from megaloom.runtime.reference.tensors import broadcast

from .kept import Columns, Rows


def keys_and_values(v: Value, args: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return the keys and values of an attention, [rows, kv_heads, positions, channels]."""
    queries = v.args[0].shape
    k, w = (broadcast(args[i], v.args[i].shape, heads_first(v.args[i].shape, queries)) for i in (1, 2))
    return k, w


@frozen(eq=False)
class NewQuery:
    """An attention of one query of each row. orders: of the dims of queries, keys and values, as it computes."""

    placed: PlacedOp
    groups: ProcessGroups
    op: Attend
    plain: bool
    orders: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, p: PlacedOp, groups: ProcessGroups) -> NewQuery:
        """Return the attention of a primitive."""
        v = p.step.value
        assert isinstance(v.op, Attend)
        # All that is kept is in the window, and all tokens are of one document.
        plain = is_plain_attention(evolve(v.op, documents=False, dropout=0.0, window=None))
        orders = tuple(tuple(heads_first(a.shape, v.args[0].shape)) for a in v.args[:3])
        return cls(p, groups, v.op, plain, orders)

    def to_kept(self, rows: Rows, kept: Columns, args: tuple[Tensor, ...]) -> Tensor:
        """Keep the keys and values of the newest position, and return its attention to all columns that are kept."""
        q, k, w = self._ordered(args)
        capacity, where = kept.capacity, q.device
        index = rows.once(("index", capacity), lambda: rows.newest % capacity)
        kept.write(index, k, w)
        # At index i is the column newest - (newest - i) % capacity; it is negative if there is none yet.
        indices = rows.once(("indices", capacity), lambda: torch.arange(capacity, device=where))
        offset = rows.once(("offset", capacity), lambda: -((index - indices) % capacity)[None])
        hidden = rows.once(("hidden", capacity), lambda: rows.newest + offset < rows.padding[:, None])
        return self._attend(rows, args, (q, *kept.buffers), offset, hidden)

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
        pairs = zip(args, self.placed.step.value.args, self.orders, strict=False)
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
                local = local_queries(self.placed, self.placed.step.value, args[0], self.groups)
                slopes = _slopes(local.heads, q.device)[local.first_head :][: q.shape[1]]
            others = args[3:-2] if self.op.documents else args[3:]
            y = attend_block(self.op, slopes, None, offset, documents, q, k, w, *others)
        return broadcast(y, self.orders[0], self.placed.step.value.shape)


def _mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores, [rows, 1, 1, columns]: -inf where a column is hidden."""
    return torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, -torch.inf)[:, None, None]


@lru_cache(maxsize=32)
def _slopes(heads: int, device: torch.device) -> Tensor:
    return alibi_slopes(heads).to(device)
