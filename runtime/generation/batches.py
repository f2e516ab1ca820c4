"""One batch of prompts: all positions of the prompts, then token by token until every sequence has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from megaloom.runtime.decoding.decoder import Decoder
from megaloom.runtime.decoding.decoding_state import DecodingState, merged
from megaloom.runtime.megatron import device

from .sampled_tokens import SampledTokens, Sampler, broadcast_tokens


@frozen
class Prompt:
    """The tokens that a sequence begins with, and those that an encoder reads, if the model has one."""

    tokens: tuple[int, ...]
    source: tuple[int, ...] | None = None


def sampling_rank(decoder: Decoder) -> int:
    """Return the rank that has the logits and samples tokens: the first of the last stage. Every rank calls it."""
    samples = decoder.groups.is_last_pipeline_rank and decoder.groups.tp_rank == 0
    number = torch.tensor(dist.get_rank() if samples else -1, device=device.current())
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return int(number)


@torch.no_grad()
def write_batch(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    copies: int,
    sampler: Sampler,
    source: int,
    shown: Callable[[SampledTokens], None] = lambda sampled: None,
) -> None:
    """Write the sequences of a batch, which the sampler of rank `source` collects. Every rank calls it.

    copies: rows of each prompt. shown: is called on each rank with each sampled.
    """
    logits, state = prefill_batch(decoder, prompts, copies)
    count = copies * len(prompts)
    while True:
        sampled = None
        if dist.get_rank() == source:
            assert logits is not None
            sampled = sampler.sample(logits)
        sampled = broadcast_tokens(sampled, count, source)
        shown(sampled)
        if not sampled.going_on:
            return
        parents, tokens = zip(*sampled.going_on, strict=True)
        if parents != tuple(range(count)):
            state = state.select(torch.tensor(parents, device=device.current()))
        count = len(tokens)
        logits = decoder.step(torch.tensor(tokens), state)


def prefill_batch(decoder: Decoder, prompts: Sequence[Prompt], copies: int) -> tuple[Tensor | None, DecodingState]:
    """Return logits and state after the prompts: `copies` consecutive rows for each prompt.

    Prompts of equal lengths run together, so that none is padded.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for i, prompt in enumerate(prompts):
        alike.setdefault((len(prompt.tokens), len(prompt.source or ())), []).append(i)
    found = []
    for group in alike.values():
        tokens = torch.tensor([prompts[i].tokens for i in group])
        source = None if prompts[group[0]].source is None else torch.tensor([prompts[i].source for i in group])
        found.append(decoder.prefill(tokens, source))
    order = [i for group in alike.values() for i in group]
    index = torch.tensor([order.index(i) for i in range(len(prompts)) for _ in range(copies)], device=device.current())
    whole = [x for x, _ in found if x is not None]
    return torch.cat(whole)[index] if whole else None, merged([state for _, state in found]).select(index)
