"""Quantised tensors: the values that transformers dequantises, in any part, and formats that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megaloom.dsl import UserError
from megaloom.runtime.weights.quantised import dequantised
from megaloom.runtime.weights.views import held

FOLDER = Path("gpt-oss")


def test_mxfp4_is_what_transformers_reads() -> None:
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (2, 6, 3, 16), dtype=torch.uint8, generator=draw)
    scales = torch.randint(120, 135, (2, 6, 3), dtype=torch.uint8, generator=draw)
    expected = convert_moe_packed_tensors(blocks.clone(), scales.clone())
    tensors = {"e.down_proj_blocks": held(blocks), "e.down_proj_scales": held(scales), "norm": held(torch.ones(2))}
    found, counts = dequantised(tensors, {"quant_method": "mxfp4"}, FOLDER)
    assert found.keys() == {"e.down_proj", "norm"}
    assert counts == {"mxfp4": 1}
    view = found["e.down_proj"]
    assert view.dtype is expected.dtype is torch.bfloat16
    assert torch.equal(view.read(), expected)
    assert torch.equal(view[1].narrow(0, 30, 40).read(), expected[1, 30:70])


def test_fp8_blocks_are_scaled() -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 300, generator=draw).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=draw)
    expected = weight.float() * scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    found, counts = dequantised({"w.weight": held(weight), "w.weight_scale_inv": held(scales)}, {}, FOLDER)
    assert counts == {"fp8": 1}
    assert torch.equal(found["w.weight"].read(), expected)
    assert torch.equal(found["w.weight"].T.narrow(0, 100, 60).narrow(1, 120, 30).read(), expected.T[100:160, 120:150])


def test_other_formats_are_refused() -> None:
    with pytest.raises(UserError, match=r"gpt-oss: the weights are quantised by gptq; mxfp4 and fp8 are read\n"):
        dequantised({}, {"quant_method": "gptq"}, FOLDER)
