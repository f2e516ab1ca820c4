"""The selective scan of Mamba-2 in chunks of the sequence, by matrix products.

Within a chunk it is causal attention with decay; between chunks a state is passed on. Source: Dao and Gu,
arXiv:2405.21060, section 6. Memory and work grow linearly with the sequence. On GPUs `torch.compile` fuses the kernels
between the products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megaloom.dsl import Scan, Value
from megaloom.planner.contract import capability
from megaloom.runtime.megatron.fused_loss import compiled

from .tensors import broadcast


def chunked_scan(out: Value, *args: Tensor) -> Tensor:
    """Return the scan of whole sequences: a tensor with the dims of `out`."""
    assert isinstance(out.op, Scan)
    seq = out.op.along
    order, state = ["batch", seq, "heads", "head_dim"], ["batch", seq, "groups", "state"]
    orders = (order, order[:3], ["heads"], state, state)
    x, dt, a, b, c = (broadcast(t, v.shape, dims) for t, v, dims in zip(args, out.args, orders, strict=True))
    count = x.shape[1]
    size = min(capability.SCAN_CHUNK, count)
    x, dt, b, c = (chunks(t, size) for t in (x, dt, b, c))
    decay = (dt.float() * a.float()).cumsum(2)
    y = compiled(scan_chunks)(x, dt, decay, decay[:, :, -1].cumsum(1), b, c)
    return broadcast(y.flatten(1, 2)[:, :count], order, out.shape)


def chunks(x: Tensor, size: int) -> Tensor:
    """Return [batch, chunks, size, ..] of [batch, seq, ..], padded with zeros, which change no state."""
    if padding := -x.shape[1] % size:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, padding))
    return x.unflatten(1, (-1, size))


def scan_chunks(x: Tensor, dt: Tensor, decay: Tensor, total: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return the scan of x [batch, chunks, size, heads, head_dim].

    decay: fp32 sums of dt · a within each chunk, [batch, chunks, size, heads]. total: those of all positions up to the
    end of each chunk, [batch, chunks, heads].
    """
    groups = b.shape[3]
    x = (x * dt[..., None]).unflatten(3, (groups, -1))  # b c l g h p
    decay = decay.unflatten(3, (groups, -1)).permute(0, 1, 3, 4, 2)  # b c g h l
    decay = decay.contiguous()  # else the decays between positions would have heads last, and copies would be slow
    inside = _decay_between(decay, decay).to(x.dtype)
    scores = torch.einsum("bclgn,bcmgn->bcglm", c, b)
    y = torch.einsum("bcghlm,bcmghp->bclghp", scores[:, :, :, None] * inside, x)
    # The state at the end of each chunk of its own positions, and that of all chunks before each chunk.
    remaining = (decay[..., -1:] - decay).exp().to(x.dtype)
    states = torch.einsum("bclgn,bclghp->bcgnhp", b, x * remaining.permute(0, 1, 4, 2, 3)[..., None])
    total = total.unflatten(2, (groups, -1)).permute(0, 2, 3, 1)  # b g h c
    before = F.pad(total, (1, 0))[..., :-1]
    carried = _decay_between(before, total, strict=True).to(x.dtype)
    states = torch.einsum("bghcd,bdgnhp->bcgnhp", carried, states)
    passed = torch.einsum("bclgn,bcgnhp->bclghp", c, states)
    y = passed * decay.exp().to(x.dtype).permute(0, 1, 4, 2, 3)[..., None] + y
    return y.flatten(3, 4)


def _decay_between(later: Tensor, earlier: Tensor, strict: bool = False) -> Tensor:
    """Return exp(later[l] − earlier[m]) [.., l, m], and 0 where m > l, or m ≥ l if strict."""
    gaps = later[..., :, None] + (-earlier)[..., None, :]
    hidden = torch.full(gaps.shape[-2:], -torch.inf, device=gaps.device).triu(0 if strict else 1)
    return gaps.add_(hidden).exp_()  # unlike masked_fill, a sum has no kernel in the backward pass
