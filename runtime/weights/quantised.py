"""Views of quantised tensors as the values that they stand for.

mxfp4 (GPT-OSS): pairs of 4-bit floats in `NAME_blocks`, one exponent for 32 of them in `NAME_scales`.
fp8 (DeepSeek-V3): `NAME` in float8_e4m3, and `NAME_scale_inv` with one factor for each block of 128 × 128.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaloom.dsl.errors import UserError

from .views import Box, View, source

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The floats of 4 bits (OCP Microscaling Formats 1.0, E2M1)."""
FP4_BLOCK = 32  # values with one exponent
EXPONENT_BIAS = 127
READ = ("mxfp4", "fp8")


def dequantised(
    tensors: Mapping[str, View], quantization: Mapping[str, Any], folder: Path
) -> tuple[dict[str, View], dict[str, int]]:
    """Return the tensors of a folder with views of values for quantised ones, and how many each format has.

    quantization: the field `quantization_config`. Raise UserError for another format.
    """
    method = str(quantization.get("quant_method", ""))
    if method and method not in READ:
        raise UserError(
            f"{folder}: the weights are quantised by {method}; {' and '.join(READ)} are read\n"
            "save them in bf16 first: model.dequantize() in transformers"
        )
    out, counts = dict(tensors), dict.fromkeys(READ, 0)
    height, width = quantization.get("weight_block_size") or (128, 128)
    for name in tensors:
        if name.endswith("_blocks") and (scales := out.get(_scales := name.removesuffix("_blocks") + "_scales")):
            out[name.removesuffix("_blocks")] = from_mxfp4(tensors[name], scales)
            del out[name], out[_scales]
            counts["mxfp4"] += 1
        elif name.endswith("_scale_inv") and (weight := out.get(quantised := name.removesuffix("_scale_inv"))):
            out[quantised] = from_fp8(weight, tensors[name], (height, width))
            del out[name]
            counts["fp8"] += 1
    return out, {name: count for name, count in counts.items() if count}


def from_mxfp4(blocks: View, scales: View) -> View:
    """Return the values [experts, in, out] of blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32]."""
    *outer, groups, _ = blocks.shape
    table = torch.tensor(FP4_VALUES, dtype=torch.bfloat16)

    def reader(box: Box) -> Tensor:
        *rows, columns = box
        whole = range(columns.start // FP4_BLOCK, ceil(columns.stop / FP4_BLOCK))
        packed = blocks.read((*rows, whole, range(FP4_BLOCK // 2)))
        pairs = torch.stack([table[(packed & 15).int()], table[(packed >> 4).int()]], -1)  # the low bits come first
        exponents = scales.read((*rows, whole)).int() - EXPONENT_BIAS
        values = torch.ldexp(pairs.flatten(-2), exponents[..., None]).flatten(-2)
        return values.narrow(-1, columns.start - FP4_BLOCK * whole.start, len(columns)).to(torch.bfloat16)

    view = source((*outer, groups * FP4_BLOCK), torch.bfloat16, reader)
    return view.permute(0, 2, 1)


def from_fp8(weight: View, scales: View, block: tuple[int, int]) -> View:
    """Return the values [out, in] in float32 of a weight in float8, and its factors, one for each block."""

    def reader(box: Box) -> Tensor:
        whole = tuple(range(r.start // n, ceil(r.stop / n)) for r, n in zip(box, block, strict=True))
        factors = scales.read(whole).float()
        for dim, (r, w, n) in enumerate(zip(box, whole, block, strict=True)):
            factors = factors.repeat_interleave(n, dim).narrow(dim, r.start - n * w.start, len(r))
        return weight.read(box).float() * factors

    return source(weight.shape, torch.float32, reader)
