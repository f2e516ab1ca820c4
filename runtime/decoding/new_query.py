"""Attention of the newest position of each row to the keys and values that are kept, or to an encoder's output."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import evolve
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


def attend_to_kept(p: PlacedOp, groups: ProcessGroups, rows: Rows, kept: Columns, args: tuple[Tensor, ...]) -> Tensor:
    """Add the keys and values of the newest position, and return its attention to all columns that are kept."""
    k, w = kept.append(*keys_and_values(p.step.value, args))
    columns = range(rows.columns - k.shape[2], rows.columns)
    hidden = None
    if rows.most_padding > columns.start:
        hidden = torch.arange(columns.start, columns.stop, device=k.device) < rows.padding[:, None]
    return _attend(p, groups, args, k, w, columns, hidden)


def attend_to_source(p: PlacedOp, groups: ProcessGroups, rows: Rows, args: tuple[Tensor, ...]) -> Tensor:
    """Return the attention of the newest position to another sequence, which ends early for shorter sources."""
    k, w = keys_and_values(p.step.value, args)
    columns, hidden = range(k.shape[2]), None
    if rows.source_lengths is not None and rows.least_source < k.shape[2]:
        hidden = torch.arange(k.shape[2], device=k.device) >= rows.source_lengths[:, None]
    return _attend(p, groups, args, k, w, columns, hidden)


def _attend(
    p: PlacedOp,
    groups: ProcessGroups,
    args: tuple[Tensor, ...],
    k: Tensor,
    w: Tensor,
    columns: range,
    hidden: Tensor | None,
) -> Tensor:
    """Return the attention of one query of each row. hidden: the columns that a row does not read, [rows, columns]."""
    v = p.step.value
    op = v.op
    assert isinstance(op, Attend)
    queries = v.args[0].shape
    order = heads_first(queries, queries)
    q = broadcast(args[0], queries, order)
    if is_plain_attention(evolve(op, documents=False, dropout=0.0)):  # all tokens are of one document
        mask = None if hidden is None else ~hidden[:, None, None]
        y = F.scaled_dot_product_attention(q, k, w, mask, scale=op.scale, enable_gqa=q.shape[1] != k.shape[1])
    else:
        local = local_queries(p, v, args[0], groups)
        slopes = alibi_slopes(local.heads)[local.first_head :][: q.shape[1]].to(q.device) if op.alibi else None
        others = args[3:-2] if op.documents else args[3:]
        newest = range(columns.stop - 1, columns.stop)
        documents = None if hidden is None else (torch.zeros_like(hidden[:, :1]), hidden)
        y = attend_block(op, slopes, None, newest, columns, documents, q, k, w, *others)
    return broadcast(y, order, v.shape)
