"""The gated delta rule in chunks, against one position after the other and against transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from megaloom.dsl import DeltaRule, Dim, Input, Shape, Value, apply
from megaloom.dsl.dims import BATCH, SEQ
from megaloom.dsl.errors import ShapeError
from megaloom.planner.contract.capability import TRIANGULAR_CHUNK as CHUNK
from megaloom.runtime.ops import whole
from megaloom.runtime.ops.delta_rule import delta_chunks, unit_lower_inverse

HEADS, GROUPS, CHANNELS, STATE = Dim("heads", 4), Dim("groups", 2), Dim("head_dim", 8), Dim("state", 6)


def drawn(count: int) -> tuple[Tensor, ...]:
    """Return v, decay, beta, k and q of two sequences, in fp64."""
    torch.manual_seed(count)
    v, k, q = (torch.randn(2, count, n, c, dtype=torch.float64) for n, c in ((4, 8), (2, 6), (2, 6)))
    k, q = (torch.nn.functional.normalize(x, dim=-1) for x in (k, q))
    return v, -torch.rand(2, count, 4, dtype=torch.float64), torch.rand(2, count, 4, dtype=torch.float64), k, q


def values(*dims: tuple[Dim, ...]) -> tuple[Value, ...]:
    return tuple(Value(Input(str(i)), (), Shape((BATCH, SEQ, *d))) for i, d in enumerate(dims))


@pytest.mark.parametrize("count", [1, 5, CHUNK, 2 * CHUNK + 7])
def test_chunks_are_the_rule_of_each_position(count: int) -> None:
    v, decay, beta, k, q = args = [x.requires_grad_() for x in drawn(count)]
    numbers, keys = (HEADS,), (GROUPS, STATE)
    out = apply(DeltaRule(), *values((HEADS, CHANNELS), numbers, numbers, keys, keys))
    expected = whole(out.op, out, *args)
    every = [x.repeat_interleave(2, 2) for x in (k, q)]
    found, state = delta_chunks(v, decay, beta, *every)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    dy = torch.randn_like(expected)
    theirs = torch.autograd.grad(expected, args, dy)
    for ours, right in zip(torch.autograd.grad(found, args, dy), theirs, strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-11)
    with torch.no_grad():
        y, last = torch_recurrent_gated_delta_rule(
            every[1], every[0], v, g=decay, beta=beta, initial_state=None, output_final_state=True
        )
    torch.testing.assert_close(found.float(), y.float() * STATE.known**0.5, rtol=0, atol=1e-5)  # theirs scales queries
    torch.testing.assert_close(state.float(), last.float(), rtol=0, atol=1e-5)


def test_equal_keys_lose_no_digits() -> None:
    """With equal keys and no decay, the powers of the triangular matrix grow to 1e18."""
    ones = torch.ones(1, CHUNK, CHUNK).tril(-1)
    exact = torch.eye(CHUNK) - torch.ones(CHUNK - 1).diag(-1)
    torch.testing.assert_close(unit_lower_inverse(ones)[0], exact, rtol=0, atol=1e-6)


def test_arguments_that_do_not_fit_are_refused() -> None:
    numbers, keys, odd = (HEADS,), (GROUPS, STATE), (Dim("groups", 3), STATE)
    with pytest.raises(ShapeError, match="4 heads cannot share 3 groups of keys evenly"):
        apply(DeltaRule(), *values((HEADS, CHANNELS), numbers, numbers, odd, odd))
    with pytest.raises(ShapeError, match="decay and beta must be"):
        apply(DeltaRule(), *values((HEADS, CHANNELS), keys, numbers, keys, keys))
