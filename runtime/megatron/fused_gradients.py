"""Products of weight gradients that add to DDP's buffers, by torch: megatron-core has them from Apex alone.

A product of 16-bit tensors is added to an fp32 buffer by one kernel. So no gradient is rounded to 16 bits, written and
read again. `use_torch_products` gives megatron-core's linear layers the two functions of Apex.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from . import device


def use_torch_products() -> None:
    """Let megatron-core's linear layers add weight gradients by torch, and their stand-ins take no memory of a step.

    A stand-in is what autograd gets in place of a gradient that is added already.
    """
    add = add_weight_gradient
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add)
    layers._grad_accum_fusion_available = True
    if hasattr(layers, "get_dummy_wgrad"):  # Transformer Engine's keeps one for each shape
        layers.get_dummy_wgrad = _stand_in


def add_weight_gradient(inputs: Tensor, gradient: Tensor, total: Tensor) -> None:
    """Add to `total` [m, k] the gradient of a weight, from a layer's inputs [n, k] and its output's gradient [n, m]."""
    if not len(inputs):
        return
    if total.dtype is gradient.dtype:
        total.addmm_(gradient.T, inputs)
    elif gradient.is_cuda:
        torch.addmm(total, gradient.T, inputs, out_dtype=total.dtype, out=total)
    else:
        total.add_(gradient.T @ inputs)


def _stand_in(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    make: Any = torch.zeros if zero else torch.empty
    out: Tensor = make(shape, dtype=dtype, device=device.current())
    return out
