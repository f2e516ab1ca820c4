"""Ops along the sequence: causal convolution, and the scan of a state space in its quadratic form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megaloom.dsl import Conv, Scan, Value

from .tensors import broadcast, dim_index, names


def convolution(op: Conv, out: Value, x: Tensor, kernel: Tensor) -> Tensor:
    """Return the causal convolution of each channel of x with its kernel."""
    channels = names(out.shape.without("batch", op.along))
    order = ["batch", *channels, op.along]
    taps = broadcast(kernel, out.args[1].shape, [*channels, "width"]).flatten(0, -2)[:, None]
    padded = F.pad(broadcast(x, out.shape, order).flatten(1, -2), (taps.shape[-1] - 1, 0))
    y = F.conv1d(padded, taps, groups=len(taps)).unflatten(
        1, [x.shape[dim_index(out.shape, name)] for name in channels]
    )
    return broadcast(y, order, out.shape)


def scan(op: Scan, out: Value, *args: Tensor) -> Tensor:
    """Return the state-space scan in its quadratic form (Mamba-2, Dao and Gu, arXiv:2405.21060, section 3).

    y_l = Σ_{m ≤ l} (c_l · b_m) exp(Σ_{m < j ≤ l} dt_j a) dt_m x_m, which is causal attention of c to b with decay.
    """
    seq = op.along
    state = ["batch", seq, "groups", "state"]
    order = ["batch", seq, "heads", "head_dim"]
    orders = (order, order[:3], ["heads"], state, state)
    x, dt, a, b, c = (broadcast(t, v.shape, dims) for t, v, dims in zip(args, out.args, orders, strict=True))
    b, c = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (b, c))
    decay = (dt * a).cumsum(1).movedim(1, -1)
    gaps = decay[..., :, None] - decay[..., None, :]
    future = torch.ones(gaps.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    weights = torch.einsum("blhn,bmhn->bhlm", c, b) * gaps.masked_fill(future, -torch.inf).exp()
    return broadcast(torch.einsum("bhlm,bmh,bmhp->blhp", weights, dt, x), order, out.shape)
