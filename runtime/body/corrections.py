"""Corrections of router scores: each step moves them so that the load of the experts becomes even.

A module with a corrected gate has a method `corrections`. It returns the buffer of each such gate, with the number of
tokens that each expert got since the last step. Source: arXiv:2412.19437, section 2.1.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

RATE = 1e-3  # by which a step moves a correction, as in DeepSeek-V3 and megatron-core


@frozen(eq=False)
class Correction:
    """The correction of a gate, fp32 [experts], and the tokens that each expert got on this rank, [experts]."""

    value: Tensor
    counts: Tensor


class Corrected(Protocol):
    """A module with gates whose scores are corrected."""

    def corrections(self) -> list[Correction]:
        """Return the correction of each gate."""


def corrections_of(chunks: Iterable[nn.Module]) -> Iterator[Correction]:
    """Yield the corrections of all gates in these model chunks."""
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(type(module), "corrections"):  # a Corrected; isinstance of a protocol is slow
                yield from module.corrections()


@torch.no_grad()
def move_corrections(chunks: Iterable[nn.Module], group: dist.ProcessGroup, rate: float = RATE) -> None:
    """Raise the correction of each expert with fewer tokens than the mean, lower that of others, and count anew.

    group: the ranks that hold the same layers. Gates with equally many experts share an all-reduce. Ranks of tp that
    all count the same tokens scale the counts of every expert alike, which changes no sign.
    """
    by_experts: dict[int, list[Correction]] = {}
    for correction in corrections_of(chunks):
        by_experts.setdefault(len(correction.value), []).append(correction)
    for corrections in by_experts.values():
        counts = torch.stack([c.counts.float() for c in corrections])
        dist.all_reduce(counts, group=group)
        for c, move in zip(corrections, (counts.mean(-1, keepdim=True) - counts).sign() * rate, strict=True):
            c.value.add_(move)
            c.counts.zero_()
