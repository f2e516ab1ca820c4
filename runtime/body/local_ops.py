"""Evaluation of primitives on local shards, for those that differ from their evaluation on whole tensors.

These are attention, scans, convolutions, dropout, routing, lookup in a sharded table, norms over sharded dims, and ops
on padded dims. `local_function` returns the function of `reference.evaluate` for all other primitives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from attrs import evolve
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from megaloom.dsl import (
    Attend,
    Combine,
    Conv,
    CrossEntropy,
    Dim,
    Dot,
    Drop,
    Gate,
    LogSumExp,
    Lookup,
    MoE,
    Normalize,
    Pointwise,
    Rope,
    Route,
    Scan,
    Shape,
    Sum,
    Value,
)
from megaloom.dsl.facts.placement import INVARIANT, PARTIAL, REPLICATE, PlacedOp, Transition
from megaloom.dsl.facts.primitives import Program, Step
from megaloom.dsl.ops.attention_core import sequence_dim
from megaloom.dsl.sharding_table import SEQUENCES
from megaloom.planner.contract.attention_blocks import local_ranges
from megaloom.planner.contract.capability import AttentionKernel, CoreKernel, ScanKernel
from megaloom.planner.contract.choices import Module
from megaloom.runtime.megatron import fused_loss
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.megatron.recompute import recomputed
from megaloom.runtime.reference.dropout import MaskSource, dropout_rate
from megaloom.runtime.reference.evaluate import evaluate
from megaloom.runtime.reference.tensors import broadcast, dim_index, names

from .attention import LocalQueries, ScoreDropout, attend
from .balancing_loss import Balancing
from .convolution import convolve
from .dispatch import combine_tokens, dispatch_tokens
from .rotary import rotate_by_kernel
from .scan import chunked_scan
from .transitions import perform


def local_function(
    p: PlacedOp,
    v: Value,
    *,
    groups: ProcessGroups,
    masks: MaskSource | None,
    dropout: int,
    balanced_moe: MoE | None,
    balancing: Balancing | None,
    kernel: CoreKernel | None,
    overwrites_logits: bool,
) -> Callable[..., Tensor]:
    """Return the function of the arguments of a primitive that computes this rank's shard of its result.

    masks: of dropout; None in an evaluation. dropout: the number of this primitive among those with dropout.
    balanced_moe: the MoE whose balancing loss is added. balancing: the losses of the micro-batch; None adds none.
    kernel: that of an attention core or a scan.
    """
    plain = partial(evaluate.dispatch(type(v.op)), v.op, v)
    match v.op:
        case Drop(rate):
            return partial(_dropout, p, v, masks=masks, number=dropout, groups=groups) if rate and masks else plain
        case Gate() if balanced_moe and balancing and not p.step.outer:
            return partial(_balanced_gate, balancing, balanced_moe, p, groups)
        case Route() if groups.layout.ep * groups.layout.etp > 1:
            return partial(dispatch_tokens, v, groups=groups)
        case Combine() if groups.layout.ep * groups.layout.etp > 1:
            return partial(combine_tokens, v, groups=groups)
        case Dot(over) | Sum(over) if any(p.step.axes.get(d) in ("tp", "etp") for d in over):  # of any degree
            return partial(_without_padding, p.step, v, over, groups)
        case Pointwise("div" | "log" | "reciprocal" | "sqrt") if {"tp", "etp"}.intersection(p.step.axes.values()):
            return partial(_with_ones_in_padding, p.step, v, groups)
        case Lookup(key) if p.step.axes.get(key) == "tp" and groups.layout.tp > 1:
            return partial(_sharded_lookup, v.op, v, rank=groups.tp_rank)
        case Normalize() if p.statistics_axes:
            return partial(_sharded_norm, v.op, v, p, groups=groups)
        case Normalize(over) if v.op.groups > 1 and not p.result:  # this rank holds whole groups
            degree = groups.layout.degrees.get(p.step.axes.get(over[0], ""), 1)
            return partial(_local_norm, evolve(v.op, groups=v.op.groups // degree), v)
        case Normalize():
            return partial(_local_norm, v.op, v)
        case Rope():
            return partial(rotate_by_kernel, v.op, v.shape)
        case LogSumExp(over) if over in SEQUENCES or p.step.axes.get(over) not in ("tp", None):
            return partial(_log_sum_exp, p, v, groups)
        case CrossEntropy() | LogSumExp() if p.statistics_axes or groups.layout.tp == 1:
            return partial(sharded_loss, p, v, groups=groups, overwrites=overwrites_logits)
        case Attend():
            assert isinstance(kernel, AttentionKernel)
            return partial(_attention, kernel, p, v, masks=masks, number=dropout, groups=groups)
        case Conv():
            return partial(convolve, v)
        case Scan():
            assert kernel in (ScanKernel.CHUNKS, ScanKernel.COMPILED_CHUNKS), f"a body has no {kernel}"
            return partial(recomputed, partial(chunked_scan, v))
    return plain


def _attention(
    kernel: AttentionKernel,
    p: PlacedOp,
    v: Value,
    *args: Tensor,
    masks: MaskSource | None,
    number: int,
    groups: ProcessGroups,
) -> Tensor:
    """Return the attention of this rank's queries. number: of its dropout in the node."""
    assert isinstance(v.op, Attend)
    local = local_queries(p, v, args[0], groups)
    dropped = ScoreDropout(masks, v.op.dropout, number, local) if v.op.dropout and masks else None
    run = partial(attend, kernel, v, local=local, dropped=dropped)
    recompute = kernel.fused and Module.CORE_ATTN in groups.layout.recomputed_modules
    return recomputed(run, *args) if recompute else run(*args)


def local_queries(p: PlacedOp, v: Value, q: Tensor, groups: ProcessGroups) -> LocalQueries:
    """Return the positions and heads of this rank's queries."""
    shape = v.args[0].shape
    count, heads = (q.shape[dim_index(shape, name)] for name in (sequence_dim(shape).name, "heads"))
    cp = groups.layout.cp if "cp" in p.sharded_axes else 1
    tp = groups.layout.tp if p.step.axes.get("heads") == "tp" else 1
    return LocalQueries(
        ranges=local_ranges(count, cp, groups.cp_rank if cp > 1 else 0),
        first_head=heads * groups.tp_rank if tp > 1 else 0,
        heads=heads * tp,
    )


def sharded_loss(p: PlacedOp, v: Value, x: Tensor, *labels: Tensor, groups: ProcessGroups, overwrites: bool) -> Tensor:
    """Return the cross-entropy or the log-sum-exp of logits whose columns are sharded over tp.

    Logits in fp32 that nothing else reads are overwritten, which saves a copy of them.
    """
    assert isinstance(v.op, CrossEntropy | LogSumExp)
    shape, over = v.args[0].shape, dim_index(v.args[0].shape, v.op.over)
    padding = _padding(shape[v.op.over], x, over, "tp", groups)
    if padding is not None and not overwrites:  # an Unembed has hidden the padding
        x = x.masked_fill(padding, torch.finfo(x.dtype).min)
    x, group = x.movedim(over, -1), groups.collection.tp
    swap = x.ndim == 3  # between modules, logits are [seq, batch, vocab]
    x = x.transpose(0, 1) if swap else x
    if isinstance(v.op, LogSumExp):
        out = fused_loss.log_sum_exp(x.contiguous(), group)
    else:
        ids = broadcast(labels[0], v.args[1].shape, v.shape)
        ids = ids.transpose(0, 1).contiguous() if swap else ids
        in_place = overwrites and x.dtype is torch.float32 and swap
        x = x.contiguous()
        out = vocab_parallel_cross_entropy(x, ids) if in_place else fused_loss.cross_entropy(x, ids, group)
    out = out.transpose(0, 1) if swap else out
    if any(t.axis == "tp" for t in p.result):  # each rank reads its part of the sequence: add the gradients of all
        out = perform(Transition("tp", INVARIANT, REPLICATE), out, None, groups)
    return out


def _without_padding(step: Step, v: Value, over: tuple[str, ...], groups: ProcessGroups, *args: Tensor) -> Tensor:
    """Return a sum over the dims `over`, with zeros in the padding of each argument, so that it adds nothing.

    A layout pads a vocabulary on a single device too, and what is computed from padding may be infinite.
    """
    masked = (_padding_filled(step, a, x, over, 0, groups) for a, x in zip(v.args, args, strict=True))
    return evaluate(v.op, v, *masked)


def _with_ones_in_padding(step: Step, v: Value, groups: ProcessGroups, *args: Tensor) -> Tensor:
    """Return a quotient, reciprocal, root or logarithm, with ones in the padding of its last argument.

    Padding is often 0, where the result and its gradient would be infinite, and the product of that and 0 is NaN.
    """
    *others, last = args
    a = v.args[-1]
    return evaluate(v.op, v, *others, _padding_filled(step, a, last, a.shape.names, 1, groups))


def _padding_filled(
    step: Step, a: Value, x: Tensor, over: tuple[str, ...], number: float, groups: ProcessGroups
) -> Tensor:
    """Return an argument with a number in what pads its dims `over`."""
    for i, d in enumerate(a.shape):
        axis = step.axes.get(d.name) if d.name in over else None
        padding = _padding(d, x, i, axis, groups) if axis in ("tp", "etp") else None
        x = x if padding is None else x.masked_fill(padding, number)
    return x


def _log_sum_exp(p: PlacedOp, v: Value, groups: ProcessGroups, x: Tensor) -> Tensor:
    """Return the log-sum-exp over a dim that lies on other axes than tp, such as a sequence.

    That of the shards is a log-sum-exp over the ranks, one axis after the other.
    """
    assert isinstance(v.op, LogSumExp)
    over, d = dim_index(v.args[0].shape, v.op.over), v.args[0].shape[v.op.over]
    if (axis := p.step.axes.get(d.name)) == "etp" and (padding := _padding(d, x, over, axis, groups)) is not None:
        x = x.masked_fill(padding, torch.finfo(x.dtype).min)
    out = x.float().logsumexp(over)
    for axis in p.statistics_axes:
        out = fused_loss.log_sum_exp(out[..., None], groups.of_axis(axis))
    return out


def hide_padding(p: Program, logits: Tensor, groups: ProcessGroups) -> Tensor:
    """Return local logits with the most negative number in the columns that pad the vocabulary."""
    i = dim_index(p.value.shape, "vocab")
    sharded = p.table.axis(p.value.shape["vocab"]) == "tp"
    padding = _padding(p.value.shape["vocab"], logits, i, "tp", groups) if sharded else None
    return logits if padding is None else logits.masked_fill(padding, torch.finfo(logits.dtype).min)


def _padding(d: Dim, x: Tensor, i: int, axis: str, groups: ProcessGroups) -> Tensor | None:
    """Return a mask of the padding in this rank's shard of dim `i` of a tensor; None if there is none."""
    group = groups.of_axis(axis)
    if x.shape[i] * group.size() == d.known:
        return None
    index = torch.arange(x.shape[i], device=x.device) + group.rank() * x.shape[i]
    return (index >= d.known).view([-1 if k == i else 1 for k in range(x.ndim)])


def _balanced_gate(
    balancing: Balancing, op: MoE, p: PlacedOp, groups: ProcessGroups, scores: Tensor, *correction: Tensor
) -> Tensor:
    """Return a gate, with the gradient of the balancing loss added to its own."""
    v, layout = p.step.value, groups.layout
    gate = evaluate(v.op, v, scores, *correction)
    token_groups = [groups.of_axis(name) for name in sorted(p.sharded_axes)]
    replicas = layout.tp * layout.cp // prod(group.size() for group in token_groups)
    order = ["batch", *names(v.shape.without("batch", "experts")), "experts"]
    chosen, token_scores = (
        broadcast(x, a.shape, order).flatten(1, -2) for x, a in ((gate.detach() != 0, v), (scores, v.args[0]))
    )
    return balancing.attach(op, gate, token_scores, chosen, token_groups, replicas)


def _dropout(p: PlacedOp, v: Value, x: Tensor, masks: MaskSource, number: int, groups: ProcessGroups) -> Tensor:
    """Return this rank's shard of a value after dropout, by the global position of each element.

    Inside the copies of a layer, such as experts, elements have no global position. There tp ranks draw different masks
    for shards, and equal masks for a replicated tensor.
    """
    rate = dropout_rate(v.op)
    if not p.step.outer:
        indices = (_global_positions(p, v.shape, i, n, masks, groups, x.device) for i, n in enumerate(x.shape))
        shaped = (index.view(-1, *(1 for _ in x.shape[i + 1 :])) for i, index in enumerate(indices))
        return masks.drop(x, rate, number, *shaped)
    if "tp" not in p.sharded_axes:
        return F.dropout(x, rate)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return F.dropout(x, rate)


def _global_positions(
    p: PlacedOp, shape: Shape, i: int, count: int, masks: MaskSource, groups: ProcessGroups, device: torch.device
) -> Tensor:
    """Return the positions of this rank's shard along dim i of a value, of which it has `count`."""
    d, layout = shape.dims[i], groups.layout
    if d.name == "batch":
        return masks.samples(count, device)
    axis = p.step.axes.get(d.name)
    if d.name in SEQUENCES:
        sharded_by_tp = "tp" in p.sharded_axes and "tp" not in p.step.axes.values()
        tp, cp = layout.tp if sharded_by_tp else 1, layout.cp if "cp" in p.sharded_axes else 1
        ranges = local_ranges(count * tp, cp, groups.cp_rank if cp > 1 else 0)
        positions = torch.cat([torch.arange(at.start, at.stop, device=device) for at in ranges])
        return positions.chunk(tp)[groups.tp_rank if tp > 1 else 0]
    first = 0 if axis is None or axis not in p.sharded_axes else groups.of_axis(axis).rank() * count
    return torch.arange(first, first + count, device=device)


def _sharded_lookup(op: Lookup, v: Value, indices: Tensor, table: Tensor, *, rank: int) -> Tensor:
    """Return the rows of this rank's shard of a table, and zeros for rows of other ranks."""
    rows = table.shape[dim_index(v.args[1].shape, op.key)]
    local_indices = indices - rank * rows
    is_local = (local_indices >= 0) & (local_indices < rows)
    result = evaluate(op, v, local_indices.where(is_local, 0), table)
    return result * is_local[(..., *(None for _ in range(result.ndim - is_local.ndim)))]


def _local_norm(op: Normalize, v: Value, x: Tensor, *weights: Tensor) -> Tensor:
    """Return a norm over dims that are whole here: by torch's kernel where they are the last ones."""
    if v.shape.names[-len(op.over) :] != op.over:
        return evaluate(op, v, x, *weights)
    if op.groups == 1:
        return _plain_norm(op, x, len(op.over), *weights)
    y = _plain_norm(op, x.flatten(-len(op.over)).unflatten(-1, (op.groups, -1)), 1).view_as(x)
    for combine, w in zip((torch.mul, torch.add), weights, strict=False):
        y = combine(y, w)
    return y


def _plain_norm(op: Normalize, x: Tensor, dims: int, *weights: Tensor) -> Tensor:
    scale, shift = (*weights, None, None)[:2]
    if op.centred:
        return F.layer_norm(x, x.shape[-dims:], scale, shift, op.eps)
    y = F.rms_norm(x, x.shape[-dims:], scale, op.eps)
    return y if shift is None else y + shift


def _sharded_norm(op: Normalize, v: Value, p: PlacedOp, x: Tensor, *weights: Tensor, groups: Any) -> Tensor:
    """Return a norm over sharded dims: its means, and their gradients, are reduced over the ranks."""
    dims = [dim_index(v.shape, name) for name in op.over]

    def mean(t: Tensor) -> Tensor:
        t = t.mean(dims, keepdim=True)
        for name in p.statistics_axes:
            t = perform(Transition(name, PARTIAL, REPLICATE), t / groups.layout.degrees[name], None, groups)
        return t

    if op.centred:
        x = x - mean(x)
    y = x * torch.rsqrt(mean(x.square()) + op.eps)
    for combine, w, a in zip((torch.mul, torch.add), weights, v.args[1:], strict=False):
        y = combine(y, broadcast(w, a.shape, names(v.shape)))
    return y
