"""Losses of logits whose columns may be sharded over tp, and the sums that a loss is reduced to."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megaloom.dsl import CrossEntropy, LogSumExp, LossSums, StackLosses, Value
from megaloom.dsl.facts.placement import INVARIANT, REPLICATE, Transition
from megaloom.dsl.sharding_table import SEQUENCES
from megaloom.runtime.megatron import fused_loss

from .local_op import LocalOp, TensorFunction
from .registry import local, whole, whole_function
from .tensors import broadcast, dim_index


@whole.register
def _(op: CrossEntropy, out: Value, *args: Tensor) -> Tensor:
    logits = args[0].movedim(dim_index(out.args[0].shape, op.over), -1)
    labels = broadcast(args[1], out.args[1].shape, out.shape)
    return logits.float().logsumexp(-1) - logits.gather(-1, labels[..., None])[..., 0].float()


@whole.register
def _(op: LogSumExp, out: Value, *args: Tensor) -> Tensor:
    return args[0].float().logsumexp(dim_index(out.args[0].shape, op.over))


@whole.register
def _(op: LossSums, out: Value, *args: Tensor) -> Tensor:
    losses = args[0].double()
    weights = torch.ones_like(losses)
    if len(args) > 1:
        weights = broadcast(args[1], out.args[1].shape, out.args[0].shape).double().expand_as(losses)
    return torch.stack([(losses * weights).sum(), weights.sum()])


@whole.register
def _(op: StackLosses, out: Value, *args: Tensor) -> Tensor:
    return torch.stack(args)


@local.register(CrossEntropy)
@local.register(LogSumExp)
def _(op: CrossEntropy | LogSumExp, here: LocalOp) -> TensorFunction:
    if isinstance(op, LogSumExp) and (op.over in SEQUENCES or here.axis(op.over) not in ("tp", None)):
        return partial(_log_sum_exp, op, here)
    if here.placed.statistics_axes or here.groups.layout.tp == 1:
        return partial(_of_sharded_logits, op, here)
    return whole_function(here.out)


def _log_sum_exp(op: LogSumExp, here: LocalOp, x: Tensor) -> Tensor:
    """Return the log-sum-exp over a dim that lies on other axes than tp, such as a sequence.

    That of the shards is a log-sum-exp over the ranks, one axis after the other.
    """
    a = here.out.args[0]
    if here.axis(op.over) == "etp":
        x = here.fill_padding(a, x, (op.over,), torch.finfo(x.dtype).min)
    out = x.float().logsumexp(dim_index(a.shape, op.over))
    for axis in here.placed.statistics_axes:
        out = fused_loss.log_sum_exp(out[..., None], here.groups.of_axis(axis))
    return out


def _of_sharded_logits(op: CrossEntropy | LogSumExp, here: LocalOp, x: Tensor, *labels: Tensor) -> Tensor:
    """Return the cross-entropy or the log-sum-exp of logits whose columns are sharded over tp.

    Logits in fp32 that nothing else reads are overwritten, which saves a copy of them.
    """
    logits, overwrites = here.out.args[0].shape, here.overwrites_logits
    over = dim_index(logits, op.over)
    padding = here.padding(logits[op.over], x, over, "tp")
    if padding is not None and not overwrites:  # an Unembed has hidden the padding
        x = x.masked_fill(padding, torch.finfo(x.dtype).min)
    x, group = x.movedim(over, -1), here.groups.of_axis("tp")
    swap = x.ndim == 3  # between modules, logits are [seq, batch, vocab]
    x = x.transpose(0, 1) if swap else x
    if isinstance(op, LogSumExp):
        out = fused_loss.log_sum_exp(x.contiguous(), group)
    else:
        ids = broadcast(labels[0], here.out.args[1].shape, here.out.shape)
        ids = ids.transpose(0, 1).contiguous() if swap else ids
        in_place = overwrites and x.dtype is torch.float32 and swap
        x = x.contiguous()
        out = here.overwriting_cross_entropy(x, ids) if in_place else fused_loss.cross_entropy(x, ids, group)
    out = out.transpose(0, 1) if swap else out
    if any(t.axis == "tp" for t in here.placed.result):  # each rank reads its part of the sequence: add all gradients
        out = here.perform(Transition("tp", INVARIANT, REPLICATE), out)
    return out
