"""Norms, scaling and copies of many tensors by torch's foreach kernels, for megatron-core's optimizers.

megatron-core takes them from Transformer Engine or Apex. Without these it loops over the tensors, and its norm waits
for the GPU once for each (megatron-core 0.16.1, utils.py:1200). `use_foreach_kernels` replaces these loops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import utils
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer import clip_grads, optimizer
from torch import Tensor

PART = 4096  # elements of a part of a tensor: torch's norm of so few is exact to 1e-7


def use_foreach_kernels() -> None:
    """Replace megatron-core's loops over tensors. Functions of Transformer Engine or Apex stay."""
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm
        clip_grads.multi_tensor_scale_impl = optimizer.multi_tensor_scale_impl = _scale
    optimizer._multi_tensor_copy_this_to_that = _copy
    _ParamAndGradBuffer.scale_gradients = _scale_buffer


def _norm(chunk: int, overflow: Tensor, lists: Sequence[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    """Return the 2-norm of all tensors of the first list, a tensor of one element."""
    on_cpu = lists[0][0].device.type == "cpu"
    norms = [_norm_on_cpu(x) for x in lists[0]] if on_cpu else torch._foreach_norm(lists[0])
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def _norm_on_cpu(x: Tensor) -> Tensor:
    """Return the 2-norm of a tensor from the norms of its parts.

    On CPUs torch adds the squares one after the other: of 38 million elements it loses 0.3 % of the norm in fp32.
    """
    flat, whole = x.reshape(-1).float(), x.numel() // PART * PART
    parts = [torch.linalg.vector_norm(flat[:whole].view(-1, PART), dim=1), torch.linalg.vector_norm(flat[whole:])[None]]
    return torch.linalg.vector_norm(torch.cat(parts), dtype=torch.float64).float()


def _scale(chunk: int, overflow: Tensor, lists: Sequence[list[Tensor]], factor: float) -> None:
    """Write the tensors of the first list, times a factor, to those of the second."""
    source, target = lists
    if any(a is not b for a, b in zip(source, target, strict=True)):
        torch._foreach_copy_(target, source)
    torch._foreach_mul_(target, factor)


def _copy(this: list[Tensor], that: list[Tensor], overflow_buf: Tensor | None = None) -> None:
    """Copy the tensors `this` to `that`, which may have another type."""
    if this:
        torch._foreach_copy_(that, this)


def _scale_buffer(buffer: _ParamAndGradBuffer, factor: Tensor | float) -> None:
    """Multiply the gradients of a buffer by a factor. By a tensor in fp64, as in megatron-core, takes twice as long."""
    buffer.grad_data.mul_(factor.float() if isinstance(factor, Tensor) else factor)
