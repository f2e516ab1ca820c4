"""Tokens go to their experts and back as with megatron-core's functions: values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megaloom.runtime.megatron import device

device.prepare()

from megatron.core.transformer.moe import moe_utils  # noqa: E402

from megaloom.runtime.modules import permutation  # noqa: E402

TOKENS, EXPERTS, EMBED = 9, 5, 4


def there_and_back(functions, x: Tensor, scores: Tensor, top_k: int) -> tuple[Tensor, ...]:
    """Return copies and sums of tokens, and the gradients of tokens and scores."""
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.detach().topk(top_k).indices, True)
    copies, probs, order, *_ = functions.permute(x, chosen, scores, num_out_tokens=TOKENS * top_k)
    y = functions.unpermute(copies.square() * probs[:, None], order, x.shape, routing_map=chosen)
    return copies.detach(), y.detach(), *torch.autograd.grad((y * torch.arange(EMBED)).sum(), (x, scores))


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_copies_and_sums_are_megatron_cores(top_k: int) -> None:
    source = torch.Generator().manual_seed(top_k)
    x = torch.randn(TOKENS, EMBED, generator=source, dtype=torch.float64)
    scores = torch.rand(TOKENS, EXPERTS, generator=source, dtype=torch.float64)
    ours, theirs = (there_and_back(functions, x, scores, top_k) for functions in (permutation, moe_utils))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("sizes", "order"), [([3, 0, 4, 2], [0, 1, 2, 3]), ([3, 0, 4, 2], [2, 0, 3, 1]), ([9], [0])])
def test_sorted_chunks_are_megatron_cores(sizes: list[int], order: list[int]) -> None:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, EMBED, generator=source, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(TOKENS, generator=source, dtype=torch.float64, requires_grad=True)
    found = []
    for sort in (permutation.sort_chunks, moe_utils.sort_chunks_by_idxs):
        y, weights = sort(x, torch.tensor(sizes), torch.tensor(order), probs)
        assert weights is not None
        alone, none = sort(x, torch.tensor(sizes), torch.tensor(order))
        assert none is None
        loss = (y.square() * weights[:, None] * torch.arange(1, TOKENS + 1)[:, None]).sum()
        found.append((y, weights, alone, *torch.autograd.grad(loss, (x, probs))))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_places_are_found_by_older_releases_too(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.tensor([True, False, False, True, True])
    assert permutation._true_places(mask, 3).tolist() == [0, 3, 4]
    monkeypatch.setattr(permutation, "KNOWN_COUNT_TORCH", permutation.TorchVersion("99"))
    assert permutation._true_places(mask, 3).tolist() == [0, 3, 4]


def test_tokens_with_a_capacity_are_permuted_by_megatron_core() -> None:
    chosen = torch.tensor([[True, False], [True, True], [False, False]])
    copies, _, order, *_ = permutation.permute(torch.eye(3), chosen, num_out_tokens=chosen.sum())
    assert isinstance(order, Tensor)
    assert permutation.unpermute(copies, order, torch.Size([3, 3])).tolist() == [[1, 0, 0], [0, 2, 0], [0, 0, 0]]


def test_a_gpu_sums_the_copies_that_a_cpu_adds() -> None:
    tokens = torch.tensor([0, 2, 1, 2, 0, 1])  # by expert, then by token
    y = torch.randn(len(tokens), EMBED, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums = permutation.gathered_sums(y, tokens.argsort(stable=True).view(3, -1))
    torch.testing.assert_close(sums, torch.zeros(3, EMBED, dtype=torch.float64).index_add(0, tokens, y))
