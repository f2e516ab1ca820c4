"""The gated delta rule: position by position, in chunks of the sequence, and at the newest position.

Within a chunk, with G_t the sum of its decays up to position t, the corrections u of all positions solve
(I + A) u = beta (v - exp(G) k s), A_tm = beta_t exp(G_t - G_m) k_t · k_m for m < t, where s is the state before the
chunk. Source: Yang et al., arXiv:2412.06464, section 3.3.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megaloom.dsl import DeltaRule, Value
from megaloom.planner.contract.capability import TRIANGULAR_CHUNK

from .chunked_scan import chunks
from .kv_cache import FixedState, OpState, Rows
from .local_op import LocalOp, TensorFunction
from .registry import NextPosition, first_state, local, next_position, whole
from .tensors import broadcast


@whole.register
def _(op: DeltaRule, out: Value, *args: Tensor) -> Tensor:
    """Return the results of one position after the other."""
    v, decay, beta, k, q = _per_head(op, out, args)
    state, results = v.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1]), []
    for t in range(v.shape[1]):
        state, y = _advanced(state, *(x[:, t] for x in (v, decay, beta, k, q)))
        results.append(y)
    return broadcast(torch.stack(results, 1).to(args[0].dtype), _heads(op), out.shape)


@local.register
def _(op: DeltaRule, here: LocalOp) -> TensorFunction:
    return partial(here.recomputed, partial(_chunked, op, here.out))


@first_state.register
def _(op: DeltaRule, out: Value, args: tuple[Tensor, ...]) -> OpState:
    _, state = delta_chunks(*_per_head(op, out, args))
    return FixedState(state)


@next_position.register
def _(op: DeltaRule, here: LocalOp) -> NextPosition:
    out = here.out

    def step(rows: Rows, state: OpState | None, args: tuple[Tensor, ...]) -> Tensor:
        last = cast(FixedState, state)
        after, y = _advanced(last.values, *(x[:, 0] for x in _per_head(op, out, args)))
        last.write(after)
        return broadcast(y[:, None].to(args[0].dtype), _heads(op), out.shape)

    return step


def _heads(op: DeltaRule) -> list[str]:
    return ["batch", op.along, "heads", "head_dim"]


def _per_head(op: DeltaRule, out: Value, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return v [batch, seq, heads, head_dim], decay, beta [batch, seq, heads], and k, q [batch, seq, heads, state].

    In fp32 or more.
    """
    numbers, keys = _heads(op)[:3], ["batch", op.along, "groups", "state"]
    orders = (_heads(op), numbers, numbers, keys, keys)
    wide = torch.promote_types(args[0].dtype, torch.float32)
    v, decay, beta, k, q = (broadcast(t, a.shape, o).to(wide) for t, a, o in zip(args, out.args, orders, strict=True))
    k, q = (t.repeat_interleave(v.shape[2] // t.shape[2], 2) for t in (k, q))
    return v, decay, beta, k, q


def _advanced(state: Tensor, v: Tensor, decay: Tensor, beta: Tensor, k: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state [batch, heads, state, head_dim] after one more position, and the result there."""
    state = state * decay.exp()[..., None, None]
    correction = beta[..., None] * (v - torch.einsum("bhnc,bhn->bhc", state, k))
    state = state + k[..., None] * correction[..., None, :]
    return state, torch.einsum("bhnc,bhn->bhc", state, q)


def _chunked(op: DeltaRule, out: Value, *args: Tensor) -> Tensor:
    y, _ = delta_chunks(*_per_head(op, out, args))
    return broadcast(y.to(args[0].dtype), _heads(op), out.shape)


def delta_chunks(v: Tensor, decay: Tensor, beta: Tensor, k: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results [batch, seq, heads, head_dim] and the last state [batch, heads, state, head_dim].

    A chunk multiplies the state by a matrix and adds another one to it. Both are computed for all chunks at once, so
    that one product a chunk is left to compute in order.
    """
    count = v.shape[1]
    size = min(TRIANGULAR_CHUNK, count)
    v, decay, beta, k, q = (  # chunks, batch, heads, size, ..
        chunks(x, size).movedim(1, 0).movedim(3, 2) for x in (v, decay, beta, k, q)
    )
    sums = decay.cumsum(-1)
    future = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill(future, -torch.inf).exp()
    inverse = unit_lower_inverse((beta[..., None] * between * (k @ k.mT)).tril(-1))
    values = inverse @ (beta[..., None] * v)
    keys = inverse @ ((beta * sums.exp())[..., None] * k)  # a correction is values - keys @ state
    kept = ((sums[..., -1:] - sums).exp()[..., None] * k).mT
    passed = sums[..., -1, None, None].exp() * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) - kept @ keys
    state = v.new_zeros(*v.shape[1:3], k.shape[-1], v.shape[-1]).flatten(0, 1)
    states = []
    for matrix, added in zip(passed.flatten(1, 2), (kept @ values).flatten(1, 2), strict=True):
        states.append(state)
        state = torch.baddbmm(added, matrix, state)
    before = torch.stack(states).unflatten(1, v.shape[1:3])
    y = (sums.exp()[..., None] * q) @ before + (between * (q @ k.mT)) @ (values - keys @ before)
    return y.movedim(0, 1).movedim(3, 2).flatten(1, 2)[:, :count], state.unflatten(0, v.shape[1:3])


def unit_lower_inverse(a: Tensor) -> Tensor:
    """Return (I + a)⁻¹ of strictly lower triangular matrices [.., size, size].

    The inverse of [[p, 0], [r, q]] is [[p⁻¹, 0], [-q⁻¹ r p⁻¹, q⁻¹]]: from blocks of one row to the whole matrix. A sum
    of powers of a would lose all digits where keys repeat.
    """
    size = a.shape[-1]
    padding = (1 << (size - 1).bit_length()) - size
    a = F.pad(a, (0, padding, 0, padding))
    inverse = torch.ones_like(a[..., :, None, :1])  # [.., blocks, width, width] of the blocks on the diagonal
    while (width := inverse.shape[-1]) < a.shape[-1]:
        pairs = (-1, 2 * width)
        diagonal = a.unflatten(-1, pairs).unflatten(-3, pairs).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        p, q = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -(q @ diagonal[..., width:, :width] @ p)
        inverse = torch.cat((torch.cat((p, torch.zeros_like(p)), -1), torch.cat((corner, q), -1)), -2)
    return inverse[..., 0, :size, :size]
