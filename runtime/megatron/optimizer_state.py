"""Optimizer state in a form that does not depend on layout, precision or kind of optimizer.

A checkpoint has three fp32 tensors per parameter, sharded like the parameter: its master weight under its name, and
Adam's two moments under `exp_avg.NAME` and `exp_avg_sq.NAME`. A weight that is not trained has the first only.
megatron-core's optimizers store them in three ways: the fp32 parameter itself, or those of its rows that this rank
holds, an fp32 master copy of a bf16 parameter, or a range of elements per data-parallel rank. Their own checkpoint
formats cannot be loaded into each other.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor, nn

from . import device

MODEL = "model"  # the key of the weights in a sharded state, beside those of the moments
MOMENTS = ("exp_avg", "exp_avg_sq")
AVERAGE = "average"

Averages = Mapping[int, Tensor]
"""Averaged weights, by identity of the master weight."""


@frozen(eq=False)
class ParameterState:
    """Optimizer state of one parameter on this rank: elements [start, stop) of master weight and moments."""

    param: nn.Parameter  # of the model
    tensors: tuple[Tensor, ...]  # master weight, moments, and the average if there is one; empty if start == stop
    start: int
    stop: int
    group: dist.ProcessGroup | None  # the ranks that hold the other elements; None if this rank holds all

    def gathered(self, count: int) -> tuple[Tensor, ...]:
        """Return the `count` tensors in the parameter's shape. Every rank of the group calls it.

        Sharded state is gathered on the first rank of the group, which saves it; other ranks get tensors without data.
        """
        if self.group is None:
            return tuple(tensor.detach().view(self.param.shape) for tensor in self.tensors)
        return tuple(self._gathered(self.group, i) for i in range(count))

    def _gathered(self, group: dist.ProcessGroup, i: int) -> Tensor:
        """Return one of the tensors. The device holds no other at the same time: a parameter may have all experts."""
        full = torch.zeros(self.param.numel(), device=self.param.device)
        if self.tensors:
            full[self.start : self.stop] = self.tensors[i].detach().view(-1)
        dist.reduce(full, group=group, group_dst=0)
        return (device.to_host(full) if group.rank() == 0 else full.to("meta")).view(self.param.shape)

    def copy_from(self, gathered: tuple[Tensor, ...]) -> None:
        """Copy this rank's elements from tensors in the parameter's shape."""
        for own, full in zip(self.tensors, gathered, strict=False):
            own.view(-1).copy_(full.reshape(-1)[self.start : self.stop])


def parameter_states(optimizer: MegatronOptimizer, averages: Averages | None = None) -> Iterator[ParameterState]:
    """Yield the state of each trained parameter, in one order on all ranks that hold a part of it."""
    for state in _parameter_states(optimizer):
        average = (averages[id(state.tensors[0])],) if averages is not None and state.tensors else ()
        yield evolve(state, tensors=(*state.tensors, *average))


def _parameter_states(optimizer: MegatronOptimizer) -> Iterator[ParameterState]:
    for one in optimizers_of(optimizer):
        if isinstance(one, DistributedOptimizer):
            yield from _sharded_states(one)
            continue
        pairs = [(p, p) for p in one.get_parameters()]
        if isinstance(one, Float16OptimizerWithFloat16Params):
            groups = zip(one.float16_groups, one.fp32_from_float16_groups, strict=True)
            pairs = [pair for params, masters in groups for pair in zip(params, masters, strict=True)]
            pairs += [(p, p) for group in one.fp32_from_fp32_groups for p in group]
        for param, master in pairs:
            yield ParameterState(param, _master_and_moments(one, master), 0, param.numel(), None)


def optimizers_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers that an optimizer consists of: experts have their own."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def _sharded_states(optimizer: DistributedOptimizer) -> Iterator[ParameterState]:
    for buffer, ranges in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        own = ChainMap(*(bucket["param_map"] for buckets in ranges.values() for bucket in buckets))
        for param in buffer.param_index_map:
            group = optimizer.data_parallel_group
            if param not in own:
                yield ParameterState(param, (), 0, 0, group)
                continue
            group_index, order = optimizer.model_param_group_index_map[param]
            master = optimizer.optimizer.param_groups[group_index]["params"][order]
            elements = own[param]["param"]
            yield ParameterState(param, _master_and_moments(optimizer, master), elements.start, elements.end, group)


def _master_and_moments(optimizer: MegatronOptimizer, master: Tensor) -> tuple[Tensor, ...]:
    """Return master weight and moments, creating the moments if no step has been done."""
    state = optimizer.optimizer.state[master]
    for name in MOMENTS:
        if name not in state:
            state[name] = torch.zeros_like(master, memory_format=torch.preserve_format).detach()
    state.setdefault("step", torch.zeros((), device=master.device))
    return (master, *(state[name] for name in MOMENTS))


def _step_counters(optimizer: MegatronOptimizer) -> Iterator[dict[str, Any]]:
    """Yield the dicts that may count steps under "step": torch's Adam counts per parameter, fused ones per group."""
    for one in optimizers_of(optimizer):
        yield from one.optimizer.param_groups
        yield from one.optimizer.state.values()


@torch.no_grad()
def sharded_optimizer_state(
    model: dict[str, Any], optimizer: MegatronOptimizer, averages: Averages | None, *, loading: bool
) -> dict[str, Any]:
    """Return master weights, moments and averages as sharded tensors, sharded like the parameters of `model`.

    They hold this rank's values, or with `loading` empty tensors to load into.
    """
    names = {id(entry.data): name for name, entry in model.items()}
    kinds = MOMENTS if averages is None else (*MOMENTS, AVERAGE)
    state: dict[str, Any] = {MODEL: {}, **{kind: {} for kind in kinds}}
    for one in parameter_states(optimizer, averages):
        name = names[id(one.param)]
        empty = (torch.empty_like(one.param, dtype=torch.float32, device="cpu") for _ in range(1 + len(kinds)))
        master, *others = empty if loading else one.gathered(1 + len(kinds))
        state[MODEL][name] = _with_data(model[name], master, "")
        for kind, tensor in zip(kinds, others, strict=True):
            state[kind][name] = _with_data(model[name], tensor, f"{kind}.")
    for name in model.keys() - state[MODEL].keys():
        data = model[name].data
        # Frozen parameters are saved as they are, and loaded in place. megatron-core adds objects without data.
        is_buffer = isinstance(data, Tensor) and data.is_floating_point() and not isinstance(data, nn.Parameter)
        state[MODEL][name] = _with_data(model[name], data.float(), "") if is_buffer else model[name]
    if device.gpu_count():
        torch.cuda.synchronize()  # the copies in host memory are complete
    return state


def _with_data(entry: Any, data: Tensor, prefix: str) -> Any:
    """Return a sharded tensor, or a factory of sharded tensors, with other data and a prefix before its key."""
    dtype = {"dtype": data.dtype} if isinstance(entry, ShardedTensor) else {}
    return replace(entry, key=prefix + entry.key, data=data, **dtype)


@torch.no_grad()
def restore_optimizer_state(
    state: dict[str, Any], model: dict[str, Any], optimizer: MegatronOptimizer, averages: Averages | None, *, steps: int
) -> None:
    """Copy loaded state into the optimizer and set its step count. The model's parameters are not changed."""
    names = {id(entry.data): name for name, entry in model.items()}
    kinds = MOMENTS if averages is None else (*MOMENTS, AVERAGE)
    for one in parameter_states(optimizer, averages):
        name = names[id(one.param)]
        one.copy_from((state[MODEL][name], *(state[kind][name] for kind in kinds)))
    for counter in _step_counters(optimizer):
        previous = counter.get("step")
        counter["step"] = torch.full_like(previous, steps) if isinstance(previous, Tensor) else steps
