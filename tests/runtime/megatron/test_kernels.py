"""Kernels against a plain softmax in one process: outputs and gradients, on one rank and on several."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch

from megaloom.runtime.launch import launcher
from megaloom.runtime.megatron import device

device.prepare()

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megaloom.runtime.megatron.kernels import CoreAttention, Norm, zigzag  # noqa: E402
from tests.support.limits import LIMIT  # noqa: E402

BATCH, HEADS, HEAD = 2, 4, 8


def oracle(q, k, v, causal):
    """Attention of [s, b, heads, head] as one would write it down."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) / HEAD**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), v).flatten(2)


def inputs(seq, kv_heads):
    generator = torch.Generator().manual_seed(0)
    shapes = [(seq, BATCH, HEADS, HEAD), *[(seq, BATCH, kv_heads, HEAD)] * 2, (seq, BATCH, HEADS * HEAD)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def attended(function, q, k, v, grad):
    """Output and gradients of the queries, keys and values."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves)]


def attention(causal=True, dropout=0.0, kv_heads=HEADS):
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * HEAD, num_attention_heads=HEADS, num_query_groups=kv_heads,
        context_parallel_size=parallel_state.get_context_parallel_world_size(), attention_dropout=dropout,
    )  # fmt: skip
    mask = AttnMaskType.causal if causal else AttnMaskType.no_mask
    return CoreAttention(config, 1, mask, "self", pg_collection=ProcessGroupCollection.use_mpu_process_groups())


CASES = list(product((True, False), (4, 2, 1), (torch.float64, torch.float32)))  # causal, KV heads, dtype
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}


def parallel_attention(cp, seq):
    """Return for each case the largest difference of this rank's rows from the oracle's, of output and gradients."""
    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    mine = zigzag(seq, cp, dist.get_rank())
    differences = []
    for causal, kv_heads, dtype in CASES:
        tensors = inputs(seq, kv_heads)
        expected = attended(partial(oracle, causal=causal), *tensors)
        result = attended(attention(causal, kv_heads=kv_heads), *(x[mine].to(dtype) for x in tensors))
        differences.append(max((x - y[mine]).abs().max().item() for x, y in zip(result, expected, strict=True)))
    return differences


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_attention_and_its_gradients_equal_the_formula(cp):
    for differences in launcher.run(parallel_attention, (cp, 24), cp, timeout=LIMIT):
        wrong = {case: d for case, d in zip(CASES, differences, strict=True) if d >= TOLERANCES[case[2]]}
        assert not wrong


def dropped(tp, cp, times):
    """The output of attention with dropout for one token a rank can see: v · (0 or 1 / keep)."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    layer = attention(dropout=0.5)
    x = torch.ones(2 * times, 1, HEADS // tp, HEAD)
    one_key = torch.ones(2 * times, 1, HEADS // tp, HEAD)
    return layer(x, one_key, one_key), layer.eval()(x, one_key, one_key)


def test_tensor_parallel_ranks_drop_differently_and_nothing_in_evaluation():
    (first, mask), (second, also_kept) = launcher.run(dropped, (2, 1, 64), 2, timeout=LIMIT)
    for out in (first, second):
        assert abs(out.mean() - 1) < 0.1 and (out[0] % 2 == 0).all()  # one key: it is dropped, or counts twice
    assert not torch.equal(first, second)
    torch.testing.assert_close(mask, torch.ones_like(mask))
    torch.testing.assert_close(also_kept, mask)


def test_context_parallel_ranks_drop_too():
    for out, mask in launcher.run(dropped, (1, 2, 64), 2, timeout=LIMIT):
        assert abs(out.mean() - 1) < 0.1 and out.std() > 0.01
        torch.testing.assert_close(mask, torch.ones_like(mask))


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_zigzag_shares_the_causal_mask_evenly(cp):
    indices = [zigzag(48, cp, rank) for rank in range(cp)]
    assert sorted(torch.cat(indices).tolist()) == list(range(48))
    assert len({int(positions.sum()) for positions in indices}) == 1


def test_zigzag_is_megatron_cores_order():
    assert zigzag(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag(8, 2, 1).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_equal_their_formulas(dtype):
    x = (torch.randn(5, 3, 16) * 3 + 1).to(dtype)
    weight, bias = torch.randn(16).to(dtype), torch.randn(16).to(dtype)
    rms = Norm(16, rms=True, eps=1e-3, bias=False, sequence_parallel=False, dtype=dtype)
    layer = Norm(16, rms=False, eps=1e-3, bias=True, sequence_parallel=False, dtype=dtype)
    plain = Norm(16, rms=False, eps=1e-3, bias=False, sequence_parallel=False, dtype=dtype)
    with torch.no_grad():
        for norm in (rms, layer, plain):
            norm.weight.copy_(weight)
        layer.bias.copy_(bias)
    y, w, b = x.double(), weight.double(), bias.double()
    centred = y - y.mean(-1, keepdim=True)
    layered = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * w
    for result, expected in (
        (rms(x), y / (y.square().mean(-1, keepdim=True) + 1e-3).sqrt() * w),
        (layer(x), layered + b),
        (plain(x), layered),
    ):
        assert result.dtype == dtype
        torch.testing.assert_close(result, expected.to(dtype))


def test_norms_are_marked_for_the_reduction_of_their_gradients():
    for parallel in (True, False):
        norm = Norm(4, rms=False, eps=1e-5, bias=True, sequence_parallel=parallel, dtype=torch.float32)
        assert [parameter.sequence_parallel for parameter in norm.parameters()] == [parallel, parallel]
        assert torch.equal(norm.weight, torch.ones(4)) and not norm.bias.any()
