"""The state of training in a form that no layout, precision or kind of optimizer changes.

A checkpoint has three fp32 tensors for each parameter, cut as the parameter is: its master value under its name, and
Adam's two moments under `exp_avg.` and `exp_avg_sq.` and its name. megatron-core's optimizers keep these in three ways
(the parameter itself in fp32, a master copy in bf16, a run of either's elements where they are divided over the
data-parallel ranks), and their own formats for them cannot be loaded into each other.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")


@frozen(eq=False)
class Held:
    """What this rank's optimizer holds of one parameter: the elements [start, stop) of its master value and moments."""

    param: nn.Parameter  # the model's
    tensors: tuple[Tensor, ...]  # master and moments; none if start == stop
    start: int
    stop: int
    group: dist.ProcessGroup | None  # the ranks that hold the rest; None if all of it is here

    def whole(self) -> tuple[Tensor, ...]:
        """Master and moments in the parameter's shape. Every rank of the group calls it.

        Those of a divided parameter are on the group's first rank, which saves them; the others get shapes alone.
        """
        if self.group is None:
            return tuple(tensor.detach().view(self.param.shape) for tensor in self.tensors)
        full = torch.zeros(1 + len(MOMENTS), self.param.numel(), device=self.param.device)
        for row, tensor in zip(full, self.tensors, strict=False):
            row[self.start : self.stop] = tensor.detach().view(-1)
        dist.reduce(full, group=self.group, group_dst=0)
        kept = full.to("cpu" if self.group.rank() == 0 else "meta")
        return tuple(row.view(self.param.shape) for row in kept)

    def take(self, whole: tuple[Tensor, ...]) -> None:
        """Copy this rank's elements of what `whole` gave."""
        for mine, full in zip(self.tensors, whole, strict=False):
            mine.view(-1).copy_(full.reshape(-1)[self.start : self.stop])


def held(optimizer: MegatronOptimizer) -> Iterator[Held]:
    """Each trained parameter, in the same order on all ranks that hold a part of it."""
    for one in _each(optimizer):
        if isinstance(one, DistributedOptimizer):
            yield from _divided(one)
            continue
        pairs = [(p, p) for p in one.get_parameters()]
        if isinstance(one, Float16OptimizerWithFloat16Params):
            groups = zip(one.float16_groups, one.fp32_from_float16_groups, strict=True)
            pairs = [pair for params, masters in groups for pair in zip(params, masters, strict=True)]
            pairs += [(p, p) for group in one.fp32_from_fp32_groups for p in group]
        for param, master in pairs:
            yield Held(param, _tensors(one, master), 0, param.numel(), None)


def _each(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that one is made of: experts have their own."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def _divided(optimizer: DistributedOptimizer) -> Iterator[Held]:
    for buffer, ranges in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        mine = ChainMap(*(bucket["param_map"] for buckets in ranges.values() for bucket in buckets))
        for param in buffer.param_index_map:
            group = optimizer.data_parallel_group
            if param not in mine:
                yield Held(param, (), 0, 0, group)
                continue
            at, order = optimizer.model_param_group_index_map[param]
            master = optimizer.optimizer.param_groups[at]["params"][order]
            run = mine[param]["param"]
            yield Held(param, _tensors(optimizer, master), run.start, run.end, group)


def _tensors(optimizer: MegatronOptimizer, master: Tensor) -> tuple[Tensor, ...]:
    """Master and moments; before the first step the optimizer has none of these yet."""
    state = optimizer.optimizer.state[master]
    for name in MOMENTS:
        if name not in state:
            state[name] = torch.zeros_like(master, memory_format=torch.preserve_format).detach()
    state.setdefault("step", torch.tensor(0.0))
    return (master, *(state[name] for name in MOMENTS))


def _counters(optimizer: MegatronOptimizer) -> Iterator[dict[str, Any]]:
    """Where an optimizer may count its steps, under "step": torch's Adam for each parameter, fused ones for a group."""
    for one in _each(optimizer):
        yield from one.optimizer.param_groups
        yield from one.optimizer.state.values()


@torch.no_grad()
def sharded(model: dict[str, Any], optimizer: MegatronOptimizer, *, loading: bool) -> dict[str, Any]:
    """Master values and moments as sharded tensors, from the sharded parameters of the model.

    To save, they hold this rank's values; to load, room for them.
    """
    named = {id(entry.data): name for name, entry in model.items()}
    state: dict[str, Any] = {"model": dict(model), **{name: {} for name in MOMENTS}}
    for one in held(optimizer):
        name = named[id(one.param)]
        room = (torch.empty_like(one.param, dtype=torch.float32, device="cpu") for _ in range(1 + len(MOMENTS)))
        master, *moments = room if loading else one.whole()
        state["model"][name] = _as(model[name], master, "")
        for kind, moment in zip(MOMENTS, moments, strict=True):
            state[kind][name] = _as(model[name], moment, f"{kind}.")
    return state


def _as(entry: Any, data: Tensor, prefix: str) -> Any:
    """The entry of a parameter with other data, under another key; a factory of entries has no dtype of its own."""
    dtype = {"dtype": data.dtype} if isinstance(entry, ShardedTensor) else {}
    return replace(entry, key=prefix + entry.key, data=data, **dtype)


@torch.no_grad()
def restore(state: dict[str, Any], model: dict[str, Any], optimizer: MegatronOptimizer, *, steps: int) -> None:
    """Take over what `sharded` made room for, after so many steps. The model's own values are not touched."""
    named = {id(entry.data): name for name, entry in model.items()}
    for one in held(optimizer):
        name = named[id(one.param)]
        one.take((state["model"][name], *(state[kind][name] for kind in MOMENTS)))
    for counter in _counters(optimizer):
        kept = counter.get("step")
        counter["step"] = torch.full_like(kept, steps) if isinstance(kept, Tensor) else steps
