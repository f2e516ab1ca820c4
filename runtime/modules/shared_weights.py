"""Weights that several graph nodes use: one parameter on each pipeline rank, one name in checkpoints.

All nodes of a rank use one parameter, which belongs to the first chunk that uses the weight. Each other rank that uses
it has a copy. Copies start with equal values, and `SharedGradients.sum` adds up their gradients in each step. The name
and the one copy that counts in the gradient norm and in checkpoints are those of the first node of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from attrs import frozen
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor, nn

from megaloom.dsl import Graph, Node
from megaloom.planner.contract.module_kinds import TABLES
from megaloom.planner.contract.plans import Stage
from megaloom.planner.rules.shared_weights import groups_of_copies, shared_weight_users
from megaloom.runtime.body.body_module import Body, parameter_or_buffer
from megaloom.runtime.megatron.process_groups import ProcessGroups, collective_timeout


@frozen(eq=False)
class SharedUse:
    """A use of a shared weight by a node of a model chunk."""

    weight: str  # name in the model
    node: Node
    module: nn.Module
    parameter: str  # name in the module
    owner: str  # NODE.PARAMETER of the first node of the graph
    is_owner: bool  # True for that node

    @property
    def tensor(self) -> Tensor:
        """Return the parameter, or the buffer if the weight is not trained."""
        return parameter_or_buffer(self.module, self.parameter)

    def use(self, tensor: Tensor, *, owned: bool) -> None:
        """Let the module compute with a tensor. If not owned, it is none of the module's parameters or buffers."""
        path, _, last = self.parameter.rpartition(".")
        module = self.module.get_submodule(path)
        delattr(module, last)
        if not owned:
            object.__setattr__(module, last, tensor)
        elif isinstance(tensor, nn.Parameter):
            module.register_parameter(last, tensor)
        else:
            module.register_buffer(last, tensor)


@frozen(eq=False)
class SharedUses:
    """The uses of shared weights in a model chunk, by weight, in the order of the graph."""

    by_weight: dict[str, list[SharedUse]]

    @classmethod
    def of(cls, graph: Graph, modules: Iterable[tuple[Node, nn.Module]]) -> SharedUses:
        """Return the uses in a chunk with these nodes, and let the uses of each weight have one parameter."""
        users, uses = shared_weight_users(graph), dict[str, list[SharedUse]]()
        for node, module in modules:
            for name in (s.name for s in node.weights if s.name in users):
                first = users[name][0]
                owner = f"{first.name}.{'weight' if isinstance(first.op, TABLES) else name}"
                parameter = name if isinstance(module, Body) else "weight"
                use = SharedUse(name, node, module, parameter, owner, node is first)
                uses.setdefault(name, []).append(use)
        for first_use, *others in uses.values():
            for use in others:
                use.use(first_use.tensor, owned=True)
        return cls(uses)

    def saved_once(self, node: Node, state: dict[str, Any], prefix: str) -> dict[str, Any]:
        """Return the sharded state of a node without what another node of the chunk saves, and with copies as replicas.

        prefix: of the names in the state, that of the node included.
        """
        outer = prefix.removesuffix(f"{node.name}.")
        for first, use in ((uses[0], use) for uses in self.by_weight.values() for use in uses if use.node is node):
            key = prefix + use.parameter
            if key in state and use is not first:
                del state[key]
            elif key in state:
                shards = state[key]
                replica = shards.replica_id if use.is_owner else (1, *shards.replica_id[1:])
                # A factory makes shards under the weight's own name; only other parameters need that of the owner.
                name = shards.key if isinstance(shards, ShardedTensorFactory) else outer + use.owner
                state[key] = replace(shards, key=name, replica_id=replica)
        return state


@frozen(eq=False)
class SharedGradients:
    """The uses of this rank of weights that other pipeline ranks have copies of, each with the group of these ranks."""

    uses: tuple[tuple[SharedUse, dist.ProcessGroup], ...]

    def sum(self) -> None:
        """Add up the gradients of all copies. Every rank calls it, after the gradients are reduced over dp."""
        for use, group in self.uses:
            dist.all_reduce(use.tensor.main_grad, group=group)  # type: ignore[attr-defined]


def share_between_chunks(chunks: Sequence[SharedUses]) -> None:
    """Let the chunks of a rank compute with one parameter of each weight. Their parameters have their values already.

    The parameter belongs to the first chunk that uses it. That chunk runs first in the forward pass, so its weights are
    gathered, and last in the backward pass, so the gradient is complete when it is reduced.
    """
    tensors: dict[str, Tensor] = {}
    for chunk in chunks:
        for name, uses in chunk.by_weight.items():
            if name in tensors:
                for use in uses:
                    use.use(tensors[name], owned=False)
            else:
                tensors[name] = uses[0].tensor


def share_between_ranks(
    graph: Graph, stages: Sequence[Stage], chunks: Sequence[SharedUses], groups: ProcessGroups
) -> SharedGradients:
    """Return the parameters that pipeline ranks have copies of. Every rank calls it, before gradients have buffers.

    A copy that another rank counts gets the attribute `shared`, which megatron-core's gradient norm reads.
    `shared_embedding` gives each its own bucket, so that the distributed optimizer shards all copies alike.
    """
    own = {name: uses[0] for chunk in reversed(chunks) for name, uses in chunk.by_weight.items()}
    users = ((name, nodes) for name, nodes in shared_weight_users(graph).items() if graph.weights[name].trained)
    ranks_of = {name: pipeline_ranks(graph, nodes, stages) for name, nodes in users}
    made = {ranks: _group_of(ranks, groups) for ranks in groups_of_copies(ranks_of.values(), groups.layout.pp)}
    uses = []
    for name, ranks in ranks_of.items():
        group = made[ranks] if ranks in made else groups.of_axis("pp")
        if len(ranks) > 1 and group is not None:
            p = own[name].tensor
            assert isinstance(p, nn.Parameter)
            p.shared_embedding, p.shared = True, not own[name].is_owner  # type: ignore[attr-defined]
            uses.append((own[name], group))
    return SharedGradients(tuple(uses))


def pipeline_ranks(graph: Graph, nodes: Iterable[Node], stages: Iterable[Stage]) -> tuple[int, ...]:
    """Return the pipeline ranks of the stages with any of these nodes, in order."""
    indices = [graph.index[n.name] for n in nodes]
    return tuple(sorted({s.rank for s in stages if any(s.start <= i < s.stop for i in indices)}))


def _group_of(ranks: tuple[int, ...], groups: ProcessGroups) -> dist.ProcessGroup | None:
    """Return the process group of these pipeline ranks with this rank's other indices; None on other pipeline ranks.

    Every rank calls it. Pipeline ranks are the outermost axis of megatron-core's ranks.
    """
    group, width = None, groups.layout.world // groups.layout.pp
    for inner in range(width):
        members = [rank * width + inner for rank in ranks]
        made = dist.new_group(members, timeout=collective_timeout())
        group = made if dist.get_rank() in members else group
    return group
