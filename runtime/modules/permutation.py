"""Permutation of tokens to the order of their experts and back, where each token has `top_k` experts.

megatron-core 0.16.1 adds the copies of a token to each other in memory, with atomic operations on bf16 numbers. Here
a GPU gathers and sums the copies of a token in one pass, in fp32 and in a fixed order. megatron-core also waits for the
number of copies, and splits and concatenates chunks of tokens one by one; here the host waits for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from megatron.core.transformer.moe import moe_utils
from torch import Tensor
from torch.torch_version import TorchVersion

from megaloom.runtime.megatron.fused_loss import compiled
from megaloom.runtime.megatron.releases import results_of_permute

KNOWN_COUNT_TORCH = TorchVersion("2.7")
"""The first torch that finds a known number of true elements on a GPU, for which the host need not wait."""


@frozen(eq=False)
class Permutation:
    """The order of the copies of tokens: by expert, then by token."""

    tokens: Tensor  # the token of each copy [copies]


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    **rest: Any,
) -> tuple[Any, ...]:
    """Return the copies of tokens [tokens, embed] in the order of their experts, their probabilities, and that order.

    It has the arguments of megatron-core's function, which it calls where tokens may have fewer than `top_k` experts:
    where the number of copies is a tensor. routing_map: True for the experts of each token, [tokens, experts].
    """
    if fused or drop_and_pad or not isinstance(num_out_tokens, int):
        found: tuple[Any, ...] = moe_utils.permute(
            tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad, **rest
        )
        return found
    places = _true_places(routing_map.T.flatten(), num_out_tokens)
    chosen = None if probs is None else _Selected.apply(probs.T.flatten(), places)
    index = places % len(tokens)
    return results_of_permute(_Copies.apply(tokens, index), chosen, Permutation(index))


def _true_places(mask: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` true elements of a mask [n]."""
    if TorchVersion(torch.__version__) < KNOWN_COUNT_TORCH:
        return mask.nonzero()[:, 0]
    return mask.nonzero_static(size=count)[:, 0]


def unpermute(copies: Tensor, order: Permutation | Tensor, restore_shape: torch.Size, **rest: Any) -> Tensor:
    """Return the sum of each token's copies [copies, embed]: a tensor [tokens, embed]. order: that of `permute`."""
    if isinstance(order, Tensor):
        out: Tensor = moe_utils.unpermute(copies, order, restore_shape, **rest)
        return out
    assert rest.get("probs") is None, "experts multiply by the probabilities of their tokens"
    out = _Sums.apply(copies, order.tokens, restore_shape[0])
    return out


def sort_chunks(
    x: Tensor, sizes: Tensor, order: Tensor, probs: Tensor | None = None, fused: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return chunks of tokens [tokens, embed], and of their probabilities [tokens], in another order.

    sizes: tokens of each chunk. order: which chunk is at each place. It stands for megatron-core's
    `sort_chunks_by_idxs`, which it calls where kernels of Transformer Engine are asked for.
    """
    if fused:
        found: tuple[Tensor, Tensor | None] = moe_utils.sort_chunks_by_idxs(x, sizes, order, probs, fused)
        return found
    if bool((order[1:] > order[:-1]).all()):  # experts of one device
        return x, probs
    rows = _chunk_rows(sizes.to(x.device, non_blocking=True), order.to(x.device, non_blocking=True), len(x))
    return _Selected.apply(x, rows), None if probs is None else _Selected.apply(probs, rows)


def _chunk_rows(sizes: Tensor, order: Tensor, count: int) -> Tensor:
    """Return the row that each of `count` rows comes from, if chunks of these sizes are put in this order."""
    ends, new_ends = sizes.cumsum(0), sizes[order].cumsum(0)
    rows = torch.arange(count, device=sizes.device)
    moved = ends[order] - new_ends  # by which the rows of each chunk lie behind
    return rows + moved[torch.searchsorted(new_ends, rows, right=True)]


class _Selected(torch.autograd.Function):
    """Rows of a tensor, each at most once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        make = torch.empty if len(rows) == ctx.count else torch.zeros
        dx = make(ctx.count, *gradients[0].shape[1:], dtype=gradients[0].dtype, device=rows.device)
        return dx.index_copy_(0, rows, gradients[0]), None


class _Copies(torch.autograd.Function):
    """Autograd function of `permute`. It saves the token of each copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.count = len(x)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        return _sums_by_token(gradients[0], tokens, ctx.count), None


class _Sums(torch.autograd.Function):
    """Autograd function of `unpermute`. It saves the token of each copy."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, tokens: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(tokens)
        return _sums_by_token(y, tokens, count)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        return gradients[0].index_select(0, tokens), None, None


def _sums_by_token(y: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Return the sum of the copies [copies, embed] of each of `count` tokens, which have equally many.

    A CPU adds them one after the other, in a fixed order and without a gathered tensor.
    """
    if not y.is_cuda:
        return y.new_zeros(count, y.shape[1]).index_add_(0, tokens, y)
    return compiled(gathered_sums)(y, tokens.argsort(stable=True).view(count, -1))


def gathered_sums(y: Tensor, positions: Tensor) -> Tensor:
    """Return the sum of the rows of y at each token's positions [tokens, top_k]."""
    return y[positions].sum(1)
