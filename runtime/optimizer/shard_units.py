"""The units of a model chunk that FSDP gathers and frees together.

A unit is a segment of the chunk: what a block has of its nodes here, and what lies before and after the blocks.
Segments that share a parameter are one unit, gathered from the first to the last of them. Inside are units of a node:
weights of experts, which other ranks share, and weights of another type than the model computes in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megaloom.dsl import Embed, Positions, UserError
from megaloom.planner.contract.state_placement import SHARDED, StatePlacement, state_placements
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.megatron.weight_shards import RowShard
from megaloom.runtime.modules.model_chunk import ModelChunk

from .shard_reduction import use_freed_memory
from .unused_weights import reduce_unused

LOOKUPS = (Embed, Positions)


class SegmentUnit(nn.Module):
    """A segment of a model chunk, as a module that holds the modules of its nodes."""

    def __init__(self, chunk: ModelChunk, index: int, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.index = index
        holders = [n for n in chunk.segments[index].nodes if n.weights]
        # Its gradients read no weights, so the backward pass needs none gathered.
        self.only_looks_up = all(isinstance(n.op, LOOKUPS) for n in holders)
        object.__setattr__(self, "chunk", chunk)  # not a part of its own part

    def forward(self, *reads: Tensor, **options: Any) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self.chunk.run_segment(self.index, *reads, **options)
        return outputs


class NodeUnit(nn.Module):
    """A node with weights that are gathered over other ranks, or in another type, than those of its segment."""

    def __init__(self, module: nn.Module, runner: nn.Module, of_experts: bool) -> None:
        super().__init__()
        self.module, self.runner = module, runner  # the runner is the module, or another such unit of it
        self.of_experts = of_experts

    def forward(self, *inputs: Tensor, **options: Any) -> Tensor:
        out: Tensor = self.runner(*inputs, **options)
        return out


class ShardedUnits(nn.Module):
    """All units of a model chunk, which share streams and prefetch one another. `fully_shard` adds methods."""

    def __init__(
        self, chunk: ModelChunk, segments: Iterable[nn.Module], placements: tuple[StatePlacement, StatePlacement]
    ) -> None:
        super().__init__()
        self.segments = nn.ModuleList(segments)
        self.placements = placements  # of dense weights, and of experts
        object.__setattr__(self, "chunk", chunk)

    def forward(self, **inputs: Any) -> Tensor | dict[str, Tensor]:
        out: Tensor | dict[str, Tensor] = self.chunk(**inputs)
        return out

    def sharded_units(self) -> Iterator[FSDPModule]:
        """Yield the units that have weights."""
        yield from (unit for unit, _ in self.placed_units())

    def placed_units(self) -> Iterator[tuple[FSDPModule, StatePlacement]]:
        """Yield the units that have weights, each with the placement of its state."""
        for m in self.modules():
            if isinstance(m, FSDPModule) and m is not self:
                yield m, self.placements[isinstance(m, NodeUnit) and m.of_experts]


def shard_units(chunk: ModelChunk, groups: ProcessGroups, compute: torch.dtype) -> ShardedUnits:
    """Shard the weights of a model chunk over its data-parallel ranks, unit by unit, and let it run by units.

    compute: the type of gathered weights. Trained shards are fp32, the master weights.
    """
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise UserError(f"sharded weights need torch 2.8 or later, and this is {torch.__version__}\nupdate torch")
    _check_sharing(chunk)
    attributes = {name: dict(vars(p)) for name, p in chunk.named_parameters()}
    dtypes = {name: p.dtype for name, p in chunk.named_parameters()}
    sharding = _Sharding.of(groups, compute)
    inner = _node_units(chunk, sharding.usual)
    segments = [_segment_unit(chunk, i, inner) for i in range(len(chunk.segments))]
    for kind, units in _by_kind(inner).items():
        sharding.apply(units, kind)
    sharding.apply(segments, sharding.usual, kept=segments[-1] if chunk.post_process else None)
    root = ShardedUnits(chunk, segments, sharding.placements)
    fully_shard(root, mesh=sharding.dense)
    reduce_unused(root)
    for unit, placed in root.placed_units():
        unit.set_reshard_after_backward(placed.weights == SHARDED, recurse=False)
        unit.set_gradient_divide_factor(1.0)  # the loss is a sum over tokens, so gradients are summed
        unit.set_force_sum_reduction_for_comms(True)
        use_freed_memory(unit)
        unit.set_unshard_in_backward(not (isinstance(unit, SegmentUnit) and unit.only_looks_up))
    # Shards of parameters on the meta device get memory now.
    root._apply(lambda x: torch.empty_like(x, device=device.current()) if x.is_meta else x)
    for name, p in chunk.named_parameters():
        _note_shard(p, attributes[name], dtypes[name], groups)
    chunk.segment_runners = tuple(segments)
    return root


@frozen
class _Kind:
    """Weights that one unit may hold: they have the same copies, and are gathered in the same type."""

    of_experts: bool
    dtype: torch.dtype  # of gathered weights: that which their module gave them

    @classmethod
    def of(cls, p: nn.Parameter) -> _Kind:
        """Return the kind of a parameter that is not sharded yet."""
        return cls(not getattr(p, "allreduce", True), p.dtype)


@frozen(eq=False)
class _Sharding:
    """The meshes of dense weights and of experts, and how units are gathered and freed."""

    dense: DeviceMesh
    experts: DeviceMesh
    usual: _Kind  # of the weights of segments: dense ones, in the type in which the model computes
    placements: tuple[StatePlacement, StatePlacement]  # of dense weights, and of experts

    @classmethod
    def of(cls, groups: ProcessGroups, compute: torch.dtype) -> _Sharding:
        """Return the sharding of a layout."""
        kind, layout = device.current().type, groups.layout
        dense, experts = (DeviceMesh.from_group(g, kind) for g in (groups.collection.dp_cp, groups.collection.expt_dp))
        usual = _Kind(of_experts=False, dtype=compute)
        return cls(dense, experts, usual, state_placements(layout))

    def apply(self, modules: Sequence[nn.Module], kind: _Kind, kept: nn.Module | None = None) -> None:
        """Make each module a unit of its weights of one kind; modules that share some of them are one unit.

        Gathered weights are freed after each pass of a micro-batch where they are sharded then, else after the step.
        kept: the module after which the backward pass follows at once, so that its weights stay gathered in between.
        """
        frees = self.placements[kind.of_experts].weights == SHARDED
        for members in _sharing_parameters(modules, kind):  # which holds no parameters: each unit's are freed here
            own = {p for m in members for p in _whole_parameters(m, kind)}
            for p in own:
                p.data = (p.data.float() if p.requires_grad else p.data).contiguous()
            fully_shard(
                members if len(members) > 1 else members[0],
                mesh=self.experts if kind.of_experts else self.dense,
                reshard_after_forward=frees and kept not in members,
                mp_policy=MixedPrecisionPolicy(kind.dtype, torch.float32, cast_forward_inputs=False),
                ignored_params={p for m in members for p in m.parameters()} - own,
            )


def _check_sharing(chunk: ModelChunk) -> None:
    """Raise UserError if a model chunk computes with a parameter of another chunk."""
    own = {id(p) for p in chunk.parameters()}
    for name, uses in chunk.shared.by_weight.items():
        if isinstance(uses[0].tensor, nn.Parameter) and id(uses[0].tensor) not in own:
            raise UserError(
                f"two chunks of one pipeline rank use the weight {name!r}, which cannot be sharded over data-parallel "
                "ranks then\nuse --vpp 1, or --shard optimizer"
            )


def _node_units(chunk: ModelChunk, usual: _Kind) -> dict[tuple[str, _Kind], NodeUnit]:
    """Return a unit for each kind of weights of each node but the usual one, and let the nodes run by them."""
    units = {}
    for n, module in chunk.node_modules():
        for kind in dict.fromkeys(map(_Kind.of, module.parameters())):
            if kind != usual:
                units[n.name, kind] = NodeUnit(module, chunk.node_runners.get(n.name, module), kind.of_experts)
                chunk.node_runners[n.name] = units[n.name, kind]
    return units


def _by_kind(units: Mapping[tuple[str, _Kind], NodeUnit]) -> dict[_Kind, list[NodeUnit]]:
    """Return the units of each kind of weights."""
    out: dict[_Kind, list[NodeUnit]] = {}
    for (_, kind), unit in units.items():
        out.setdefault(kind, []).append(unit)
    return out


def _segment_unit(chunk: ModelChunk, index: int, inner: Mapping[tuple[str, _Kind], NodeUnit]) -> SegmentUnit:
    """Return a segment as a module, which holds the units of its nodes."""
    names = {n.name for n in chunk.segments[index].nodes}
    units = [unit for (name, _), unit in inner.items() if name in names]
    return SegmentUnit(chunk, index, [*(chunk.module_of(n) for n in chunk.segments[index].nodes), *units])


def _whole_parameters(module: nn.Module, kind: _Kind) -> list[nn.Parameter]:
    """Return the parameters of a kind that are not sharded yet."""
    return [p for p in module.parameters() if not isinstance(p, DTensor) and _Kind.of(p) == kind]


def _sharing_parameters(modules: Iterable[nn.Module], kind: _Kind) -> list[list[nn.Module]]:
    """Return the modules that have parameters of a kind; those that share any, directly or through others, together."""
    groups: list[tuple[set[int], list[nn.Module]]] = []
    for module in modules:
        own, members = {id(p) for p in _whole_parameters(module, kind)}, [module]
        for group in [g for g in groups if g[0] & own]:
            groups.remove(group)
            own, members = own | group[0], [*group[1], *members]
        groups.append((own, members))
    return [members for own, members in groups if own]


def _note_shard(p: nn.Parameter, attributes: dict[str, Any], dtype: torch.dtype, groups: ProcessGroups) -> None:
    """Give a sharded parameter, and the plain tensor of its rows, the attributes that the whole one had."""
    of_expert = not attributes.get("allreduce", True)
    group = groups.collection.expt_dp if of_expert else groups.collection.dp_cp
    rows = -(-len(p) // group.size())
    start = min(group.rank() * rows, len(p))
    assert isinstance(p, DTensor)
    values = nn.Parameter(p.to_local().detach(), requires_grad=p.requires_grad)
    shard = RowShard(p, values, start, start + len(values), group, dtype)
    for tensor in (p, values):
        vars(tensor).update(attributes, row_shard=shard)
