"""Parameter groups by name: weights with a learning rate or weight decay of their own, or frozen.

`assign_groups` marks the parameters of this rank before DDP and the optimizer are made; frozen ones then have neither
gradients nor optimizer state. `group_overrides` gives the optimizer what differs. `zero_frozen_gradients` runs before
each update, for the few frozen parameters that have gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from megatron.core.optimizer import ParamGroupOverride, ParamKey, ParamPredicate
from torch import nn

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Graph
from megaloom.runtime.modules.built_node import fused_weights
from megaloom.runtime.modules.model_chunk import ModelChunk

from .recipe import Recipe


@frozen
class ParameterGroup:
    """Weights with settings of their own, selected by their names in the model, such as attention.0.q.

    The first group that matches a weight has it. Norms and biases have no weight decay in any group.
    """

    names: str  # a pattern with * and ?, as in a shell, of names in `graph(model).weights` or of NODE.WEIGHT
    lr: float | None = None  # peak learning rate; the recipe's, if None
    weight_decay: float | None = None  # the recipe's, if None
    frozen: bool = False  # the parameters stay as they are


@frozen
class _InGroup:
    """Predicate of the parameters of one group."""

    index: int

    def __call__(self, p: torch.Tensor) -> bool:
        return getattr(p, "parameter_group", None) == self.index


def named_parameters(chunks: Sequence[ModelChunk]) -> Iterator[tuple[tuple[str, ...], nn.Parameter]]:
    """Yield this rank's parameters, each with the names in the model of the weights that it holds.

    The names do not depend on the layout. A parameter that a module of one's own computes from weights has its own
    name, NODE.PARAMETER.
    """
    for chunk in chunks:
        for it in chunk.nodes:
            weights = it.parameter_weights
            for name, p in it.module.named_parameters():
                yield weights[name], p


def assign_groups(chunks: Sequence[ModelChunk], groups: Sequence[ParameterGroup]) -> None:
    """Mark each parameter with the first group whose pattern matches its weights. Every rank calls it.

    Raise UserError for a group that matches no parameter of the model, or none that another group has not matched, and
    for one that has some but not all of the weights that a module may hold in one parameter.
    """
    if not groups:
        return
    choice = _Choice.of(chunks[0].graph, groups)
    names = [(weights, p) for weights, p in named_parameters(chunks) if not hasattr(p, "parameter_group")]
    used = set()
    for weights, p in names:
        found = [choice.of_weight(name) for name in weights]
        p.parameter_group = found[0]  # type: ignore[attr-defined]
        used.update(found)
    gathered: list[tuple[set[int | None], list[str]]] = [(set(), [])] * dist.get_world_size()
    dist.all_gather_object(gathered, (used, [name for weights, _ in names for name in weights]))
    used_by_any = set().union(*(each for each, _ in gathered))
    for i, group in enumerate(groups):
        if i not in used_by_any:
            known = sorted({name for _, names in gathered for name in names})
            raise UserError(
                f"the parameter group {group.names!r} matches no weight, or only those of earlier groups\n"
                f"names are such as {', '.join(known[:: max(1, len(known) // 4)][:4])}"
            )
    for chunk in chunks:
        _freeze(chunk, groups)


@frozen
class _Choice:
    """The group of each weight: the first whose pattern matches the name of the weight or NODE.WEIGHT."""

    groups: Sequence[ParameterGroup]
    users: Mapping[str, str]  # the first node that uses a weight, by the name of the weight

    @classmethod
    def of(cls, graph: Graph, groups: Sequence[ParameterGroup]) -> _Choice:
        """Return the choice for a model. Raise UserError if a group has some of the weights of one parameter only."""
        users = {s.name: n.name for n in reversed(graph.nodes) for s in n.weights}
        choice = cls(groups, users)
        for names in (names for n in graph.nodes for names in fused_weights(n)):
            found = [choice.settings_of(name) for name in names]
            if len(set(found)) > 1:
                group, inside = next((s, n) for s, n in zip(found, names, strict=True) if s is not None)
                outside = next(n for s, n in zip(found, names, strict=True) if s != group)
                raise UserError(
                    f"a parameter group has {inside} but not {outside}, which a module of megatron-core holds in one "
                    f"parameter\ngive the same settings to {', '.join(names)}"
                )
        return choice

    def settings_of(self, name: str) -> ParameterGroup | None:
        """Return the settings of a weight without the pattern that it is selected by; None if it has no group."""
        index = self.of_weight(name)
        return None if index is None else evolve(self.groups[index], names="")

    def of_weight(self, name: str) -> int | None:
        """Return the index of the group of a weight; None if no pattern matches."""
        known = {name, f"{self.users.get(name, '')}.{name}"}
        matches = (i for i, group in enumerate(self.groups) if any(fnmatchcase(n, group.names) for n in known))
        return next(matches, None)


def _freeze(chunk: ModelChunk, groups: Sequence[ParameterGroup]) -> None:
    """Let frozen parameters have no gradients, where the others need none.

    megatron-core computes no gradient of a bias whose weight has none, and copies of a shared weight add up theirs.
    """
    shared = {id(use.tensor) for uses in chunk.shared.by_weight.values() for use in uses}
    for module in chunk.modules():
        own = list(module.parameters(recurse=False))
        if all(_is_frozen(p, groups) and id(p) not in shared for p in own):
            chunk.has_frozen |= bool(own)
            for p in own:
                p.requires_grad_(False)


def _is_frozen(p: nn.Parameter, groups: Sequence[ParameterGroup]) -> bool:
    index = getattr(p, "parameter_group", None)
    return index is not None and groups[index].frozen


def group_overrides(groups: Sequence[ParameterGroup], recipe: Recipe) -> dict[ParamKey, ParamGroupOverride]:
    """Return megatron-core's overrides for parameter groups. The learning rate keeps the shape of the schedule."""
    out: dict[ParamKey, ParamGroupOverride] = {}
    for i, group in enumerate(groups):
        lr = 0.0 if group.frozen else recipe.peak_lr if group.lr is None else group.lr
        decay = recipe.weight_decay if group.weight_decay is None else group.weight_decay
        lowest = recipe.lowest_lr * lr / recipe.peak_lr
        key = ParamKey(predicate=ParamPredicate(f"group {i}", _InGroup(i)))
        out[key] = ParamGroupOverride(max_lr=lr, min_lr=lowest, start_wd=decay, end_wd=decay)
    return out


def zero_frozen_gradients(chunks: Sequence[ModelChunk], groups: Sequence[ParameterGroup]) -> None:
    """Set the gradients of frozen parameters to zero, so that they count neither in the norm nor in the moments."""
    if any(group.frozen for group in groups):
        for p in (p for chunk in chunks for p in chunk.parameters()):
            if _is_frozen(p, groups) and p.requires_grad:
                p.main_grad.zero_()  # type: ignore[attr-defined]
