"""Ops along the sequence: convolution, scan of a state space, shifts, and positions in the sequence or in documents.

Decoding keeps the last inputs of a convolution or a shift, and the state of a scan.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megaloom.dsl import Conv, DocumentPositions, Inside, Scan, Shift, Value
from megaloom.planner.contract.capability import ScanKernel

from .chunked_scan import chunked_scan
from .convolution import convolve
from .kv_cache import FixedState, OpState, Rows
from .local_op import LocalOp, TensorFunction
from .registry import NextPosition, first_state, local, next_position, whole
from .tensors import broadcast, dim_index, document_positions, names


@whole.register
def _(op: Conv, out: Value, x: Tensor, kernel: Tensor) -> Tensor:
    channels = names(out.shape.without("batch", op.along))
    order = ["batch", *channels, op.along]
    taps = broadcast(kernel, out.args[1].shape, [*channels, "width"]).flatten(0, -2)[:, None]
    padded = F.pad(broadcast(x, out.shape, order).flatten(1, -2), (taps.shape[-1] - 1, 0))
    y = F.conv1d(padded, taps, groups=len(taps)).unflatten(
        1, [x.shape[dim_index(out.shape, name)] for name in channels]
    )
    return broadcast(y, order, out.shape)


@local.register
def _(op: Conv, here: LocalOp) -> TensorFunction:
    return partial(convolve, here.out)


@first_state.register
def _(op: Conv, out: Value, args: tuple[Tensor, ...]) -> OpState:
    x = broadcast(args[0], out.args[0].shape, _sequence_first(out, op.along))
    return _last(x, out.args[1].shape["width"].known - 1)


@next_position.register
def _(op: Conv, here: LocalOp) -> NextPosition:
    out = here.out
    order = _sequence_first(out, op.along)

    def step(rows: Rows, state: OpState | None, args: tuple[Tensor, ...]) -> Tensor:
        x = _with_newest(state, broadcast(args[0], out.args[0].shape, order))
        y = (x * broadcast(args[1], out.args[1].shape, ["width", *order[2:]])).sum(1, keepdim=True)
        return broadcast(y, order, out.shape)

    return step


@whole.register
def _(op: Scan, out: Value, *args: Tensor) -> Tensor:
    """Return the state-space scan in its quadratic form (Mamba-2, Dao and Gu, arXiv:2405.21060, section 3).

    y_l = Σ_{m ≤ l} (c_l · b_m) exp(Σ_{m < j ≤ l} dt_j a) dt_m x_m, which is causal attention of c to b with decay.
    """
    x, dt, a, b, c = _scan_args(op, out, args)
    b, c = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (b, c))
    decay = (dt * a).cumsum(1).movedim(1, -1)
    gaps = decay[..., :, None] - decay[..., None, :]
    future = torch.ones(gaps.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    weights = torch.einsum("blhn,bmhn->bhlm", c, b) * gaps.masked_fill(future, -torch.inf).exp()
    return broadcast(torch.einsum("bhlm,bmh,bmhp->blhp", weights, dt, x), _heads(op), out.shape)


@local.register
def _(op: Scan, here: LocalOp) -> TensorFunction:
    assert here.kernel in (ScanKernel.CHUNKS, ScanKernel.COMPILED_CHUNKS), f"a body has no {here.kernel}"
    return partial(here.recomputed, partial(chunked_scan, here.out))


@first_state.register
def _(op: Scan, out: Value, args: tuple[Tensor, ...]) -> OpState:
    """Return the state after the last position: Σ_m exp(Σ_{j > m} dt_j a) dt_m x_m b_mᵀ."""
    x, decay, dt, b, _ = _grouped_scan_args(op, out, args)
    sums = decay.cumsum(1)
    remaining = (sums[:, -1:] - sums).exp()
    return FixedState(torch.einsum("blghp,blgn->bghpn", x * (dt * remaining)[..., None], b))


@next_position.register
def _(op: Scan, here: LocalOp) -> NextPosition:
    out = here.out

    def step(rows: Rows, state: OpState | None, args: tuple[Tensor, ...]) -> Tensor:
        last = cast(FixedState, state)
        x, decay, dt, b, c = (t[:, 0] for t in _grouped_scan_args(op, out, args))
        added = (x * dt[..., None])[..., None] * b[:, :, None, None]
        last.write(last.values * decay.exp()[..., None, None] + added)
        y = (last.values * c[:, :, None, None]).sum(-1).flatten(1, 2)[:, None].to(args[0].dtype)
        return broadcast(y, _heads(op), out.shape)

    return step


def _heads(op: Scan) -> list[str]:
    return ["batch", op.along, "heads", "head_dim"]


def _scan_args(op: Scan, out: Value, args: tuple[Tensor, ...]) -> list[Tensor]:
    """Return x [batch, seq, heads, head_dim], dt [batch, seq, heads], a [heads], b, c [batch, seq, groups, state]."""
    state = ["batch", op.along, "groups", "state"]
    orders = (_heads(op), _heads(op)[:3], ["heads"], state, state)
    return [broadcast(t, v.shape, dims) for t, v, dims in zip(args, out.args, orders, strict=True)]


def _grouped_scan_args(op: Scan, out: Value, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return x [rows, seq, groups, heads, head_dim], log decays and dt [rows, seq, groups, heads], b and c, in fp32."""
    x, dt, a, b, c = (t.float() for t in _scan_args(op, out, args))
    groups = b.shape[2]
    decay = (dt * a).unflatten(2, (groups, -1))
    return x.unflatten(2, (groups, -1)), decay, dt.unflatten(2, (groups, -1)), b, c


@whole.register
def _(op: Shift, out: Value, *args: Tensor) -> Tensor:
    (x,) = args
    along = dim_index(out.shape, op.along)
    remaining = max(x.shape[along] - abs(op.by), 0)
    shifted = x.narrow(along, max(op.by, 0) if remaining else 0, remaining)
    zeros = torch.zeros_like(x.narrow(along, 0, x.shape[along] - remaining))
    return torch.cat((shifted, zeros) if op.by > 0 else (zeros, shifted), along)


@first_state.register
def _(op: Shift, out: Value, args: tuple[Tensor, ...]) -> OpState:
    return _last(broadcast(args[0], out.args[0].shape, _sequence_first(out, op.along)), -op.by)


@next_position.register
def _(op: Shift, here: LocalOp) -> NextPosition:
    out = here.out
    order = _sequence_first(out, op.along)

    def step(rows: Rows, state: OpState | None, args: tuple[Tensor, ...]) -> Tensor:
        x = _with_newest(state, broadcast(args[0], out.args[0].shape, order))
        return broadcast(x[:, :1], order, out.shape)

    return step


@whole.register
def _(op: Inside, out: Value, *args: Tensor) -> Tensor:
    (x,) = args
    count = x.shape[dim_index(out.shape, op.along)]
    position = torch.arange(count, device=x.device) + op.by
    inside = broadcast((position >= 0) & (position < count), [op.along], out.shape)
    return inside.expand(x.shape)


@whole.register
def _(op: DocumentPositions, out: Value, *args: Tensor) -> Tensor:
    (indices,) = args
    return op.first + document_positions(indices, dim_index(out.shape, op.along))


@next_position.register
def _(op: DocumentPositions, here: LocalOp) -> NextPosition:
    dims, shape = ["batch", op.along], here.out.shape
    return lambda rows, state, args: broadcast(rows.positions + op.first, dims, shape)


def _sequence_first(out: Value, along: str) -> list[str]:
    """Return the dims of a result with batch and sequence first."""
    return ["batch", along, *names(out.shape.without("batch", along))]


def _last(x: Tensor, count: int) -> FixedState:
    """Return the last positions of x [rows, positions, ..], after zeros if it has fewer."""
    missing = max(0, count - x.shape[1])
    zeros = x.new_zeros(len(x), missing, *x.shape[2:])
    return FixedState(torch.cat((zeros, x[:, x.shape[1] - (count - missing) :]), 1))


def _with_newest(state: OpState | None, newest: Tensor) -> Tensor:
    """Return the last inputs and the newest one, and drop the oldest of them from the state."""
    last = cast(FixedState, state)
    x = torch.cat((last.values, newest), 1)
    last.write(x[:, 1:])
    return x
