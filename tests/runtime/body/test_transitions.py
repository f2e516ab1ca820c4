"""Every transition between placements, performed on simulated ranks, against the definitions of the placements.

The ranks are threads of one process, which exchange tensors in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor
from torch.testing import assert_close

from megaloom.dsl.facts.placement import (
    INVARIANT,
    OPERATION_BY_PAIR,
    PARTIAL,
    REPLICATE,
    Invariant,
    Partial,
    Placement,
    Replicate,
    Shard,
    Transition,
    dual,
)

RANKS, SIZE, DIM = 4, 16, 1
SHARDS = (Shard("seq"), Shard("seq", zigzag=True))
SHARED = Shard("kv_heads", heads=2 * RANKS)  # 2 query heads on each rank; with 2 key/value heads 4 read each of them
PLACEMENTS = {Replicate: (REPLICATE,), Invariant: (INVARIANT,), Partial: (PARTIAL,), Shard: SHARDS}
TRANSITIONS = [
    *(Transition("tp", a, b) for x, y in OPERATION_BY_PAIR for a in PLACEMENTS[x] for b in PLACEMENTS[y]),
    Transition("tp", REPLICATE, SHARED),
]


def indices(shard: Shard, size: int, rank: int) -> list[int]:
    """Return the indices of a dim that one rank has."""
    if shard.heads:
        mine = range(rank * shard.heads // RANKS, (rank + 1) * shard.heads // RANKS)
        return sorted({head * size // shard.heads for head in mine})
    if shard.zigzag:
        chunks = torch.arange(size).chunk(2 * RANKS)
        return [*chunks[rank].tolist(), *chunks[2 * RANKS - 1 - rank].tolist()]
    return [i for i in range(size) if i * RANKS // size == rank]


def parts(placement: Placement, whole: Tensor) -> list[Tensor]:
    """Return what each rank has of a tensor, by the definition of its placement."""
    if isinstance(placement, Shard):
        return [whole[:, indices(placement, SIZE if not placement.heads else 2, rank)] for rank in range(RANKS)]
    if placement == PARTIAL:
        return [(rank + 1) / 10 * whole for rank in range(RANKS)]  # of 1 + 2 + 3 + 4
    return [whole] * RANKS


def joined(placement: Placement, tensors: list[Tensor]) -> Tensor:
    """Return the tensor of which the ranks have these parts. Where each has all of it, they must agree."""
    if isinstance(placement, Shard):
        whole = torch.full([len(tensors[0]), SIZE], torch.nan)
        for rank, x in enumerate(tensors):
            whole[:, indices(placement, SIZE, rank)] = x
        return whole
    if placement == PARTIAL:
        return torch.stack(tensors).sum(0)
    for x in tensors:
        assert_close(x, tensors[0])
    return tensors[0]


@define
class Ranks:
    """Threads that stand for ranks, with the collectives of `torch.distributed` among them."""

    barrier: Barrier = field(factory=lambda: Barrier(RANKS, timeout=10))
    sent: dict[int, Tensor] = field(factory=dict)

    def run(self, function: Callable[[int, Any], Tensor]) -> list[Tensor]:
        """Return what a function of (rank, process groups) returns on each rank."""
        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(lambda rank: function(rank, self.groups(rank)), range(RANKS)))

    def groups(self, rank: int) -> Any:
        group = SimpleNamespace(size=lambda: RANKS, rank=lambda: rank)
        return SimpleNamespace(of_axis=lambda axis: group)

    def exchanged(self, x: Tensor, group: Any) -> list[Tensor]:
        """Return the tensors of all ranks."""
        self.sent[group.rank()] = x.detach().clone()
        self.barrier.wait()
        out = [self.sent[rank] for rank in range(RANKS)]
        self.barrier.wait()
        return out

    def all_reduce(self, x: Tensor, group: Any) -> None:
        x.copy_(torch.stack(self.exchanged(x, group)).sum(0))

    def all_gather_into_tensor(self, out: Tensor, x: Tensor, group: Any) -> None:
        out.copy_(torch.cat(self.exchanged(x, group)))

    def reduce_scatter_tensor(self, out: Tensor, x: Tensor, group: Any) -> None:
        out.copy_(torch.stack(self.exchanged(x, group)).sum(0).chunk(RANKS)[group.rank()])


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    found = Ranks()
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        monkeypatch.setattr(dist, name, getattr(found, name))
    return found


@pytest.mark.parametrize("transition", TRANSITIONS, ids=lambda t: f"{t.source} to {t.target}")
def test_a_transition_and_its_gradient_are_what_the_placements_define(transition: Transition, ranks: Ranks) -> None:
    from megaloom.runtime.body.transitions import perform

    source, target = transition.source, transition.target
    torch.manual_seed(0)
    whole = torch.randn(3, 2 if target == SHARED else SIZE, requires_grad=True)
    before = [x.detach().clone().requires_grad_() for x in parts(source, whole)]
    after = ranks.run(lambda rank, groups: perform(transition, before[rank], DIM, groups))
    if target == PARTIAL:
        assert_close(joined(target, after), whole)
    else:
        for x, expected in zip(after, parts(target, whole), strict=True):
            assert_close(x, expected)

    # The objective of what the ranks do next. They do other work with Replicate and Shard, and the same otherwise.
    others = target == REPLICATE or isinstance(target, Shard)
    weights = [torch.randn_like(x) for x in after] if others else [torch.randn_like(after[0])] * RANKS
    read = parts(target, whole) if others else [whole]
    objective = torch.stack([(w * x).sum() for w, x in zip(weights, read, strict=False)]).sum()
    (expected,) = torch.autograd.grad(objective, whole)
    gradients = ranks.run(lambda rank, _: torch.autograd.grad(after[rank], before[rank], weights[rank])[0])
    assert_close(joined(dual(source), gradients), expected)


@pytest.mark.parametrize("transition", TRANSITIONS, ids=lambda t: f"{t.source} to {t.target}")
def test_a_gradient_is_the_reversed_pair_of_duals(transition: Transition) -> None:
    assert transition.gradient == Transition("tp", dual(transition.target), dual(transition.source))
    assert transition.gradient.gradient == transition
    assert transition.gradient.operation in OPERATION_BY_PAIR.values()
