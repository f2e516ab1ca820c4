"""Fused functions against megatron-core's unfused ones: values and gradients."""

from __future__ import annotations

import pytest
import torch

from megaloom.runtime.launch import launcher
from megaloom.runtime.megatron import device

device.prepare()

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd  # noqa: E402
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # noqa: E402

from megaloom.runtime.megatron import fused_loss  # noqa: E402
from megaloom.runtime.modules import fused  # noqa: E402
from tests.support.limits import LIMIT  # noqa: E402

SEQ, BATCH, VOCAB = 6, 3, 20


def graded(function, x, gradient):
    leaf = x.clone().requires_grad_()
    out = function(leaf)
    return out.detach(), *torch.autograd.grad(out, leaf, gradient)


@pytest.mark.parametrize("channels", [8, 6])
def test_positions_turn_as_megatron_core_turns_them(channels):
    source = torch.Generator().manual_seed(0)
    t, gradient = (torch.randn(SEQ, BATCH, 4, 8, generator=source, dtype=torch.float64) for _ in range(2))
    angles = torch.randn(SEQ, 1, 1, channels // 2, generator=source, dtype=torch.float64).repeat(1, 1, 1, 2)
    result = graded(lambda x: fused.apply_rope(x, angles), t, gradient)
    expected = graded(lambda x: _apply_rotary_pos_emb_bshd(x, angles), t, gradient)
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b)


def losses(tp, dtype, function):
    """On each rank: the losses and the gradient of its columns. The last two columns are no tokens."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    source = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(SEQ, BATCH, VOCAB, generator=source)
    logits[..., -2:] = torch.finfo(dtype).min
    labels = torch.randint(VOCAB - 2, (SEQ, BATCH), generator=source)
    gradient = torch.randn(SEQ, BATCH, generator=source)
    mine = logits.to(dtype).chunk(tp, -1)[dist.get_rank()]
    group = parallel_state.get_tensor_model_parallel_group()
    if function == "fused":
        return graded(lambda x: fused_loss.cross_entropy(x, labels, group), mine, gradient)
    return graded(lambda x: vocab_parallel_cross_entropy(x.float().clone(), labels), mine, gradient)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_megatron_cores(tp, dtype):
    results, expected = (
        launcher.run(losses, (tp, dtype, name), tp, timeout=LIMIT) for name in ("fused", "megatron-core")
    )
    for ours, theirs in zip(results, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype is b.dtype
            torch.testing.assert_close(a, b)
