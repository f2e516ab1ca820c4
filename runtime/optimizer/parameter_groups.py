"""Parameter groups by name: parameters with a learning rate or weight decay of their own, or frozen.

`assign_groups` marks the parameters of this rank before DDP and the optimizer are made; frozen ones then have neither
gradients nor optimizer state. `group_overrides` gives the optimizer what differs. `zero_frozen_gradients` runs before
each update, for the few frozen parameters that have gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from attrs import frozen
from megatron.core.optimizer import ParamGroupOverride, ParamKey, ParamPredicate
from torch import nn

from megaloom.dsl.errors import UserError
from megaloom.runtime.modules.model_chunk import ModelChunk

from .recipe import Recipe


@frozen
class ParameterGroup:
    """Parameters with settings of their own, selected by their names, such as attention.0.linear_qkv.weight.

    The first group that matches a parameter has it. Norms and biases have no weight decay in any group.
    """

    names: str  # a pattern with * and ?, as in a shell
    lr: float | None = None  # peak learning rate; the recipe's, if None
    weight_decay: float | None = None  # the recipe's, if None
    frozen: bool = False  # the parameters stay as they are


@frozen
class _InGroup:
    """Predicate of the parameters of one group."""

    index: int

    def __call__(self, p: torch.Tensor) -> bool:
        return getattr(p, "parameter_group", None) == self.index


def named_parameters(chunks: Sequence[ModelChunk]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield this rank's parameters by NODE.PARAMETER, such as attention.0.linear_qkv.weight.

    A weight that several layers share has the name of the first of them, on each stage that holds it.
    """
    for chunk in chunks:
        for node, module in chunk.node_modules():
            for name, p in module.named_parameters():
                yield chunk.shared.owner_of(node, name), p


def assign_groups(chunks: Sequence[ModelChunk], groups: Sequence[ParameterGroup]) -> None:
    """Mark each parameter with the first group whose pattern matches its name. Every rank calls it.

    Raise UserError for a group that matches no parameter of the model, or none that another group has not matched.
    """
    names = [(name, p) for name, p in named_parameters(chunks) if not hasattr(p, "parameter_group")]
    used = set()
    for name, p in names:
        index = next((i for i, group in enumerate(groups) if fnmatchcase(name, group.names)), None)
        p.parameter_group = index  # type: ignore[attr-defined]
        used.add(index)
    gathered: list[tuple[set[int | None], list[str]]] = [(set(), [])] * dist.get_world_size()
    dist.all_gather_object(gathered, (used, [name for name, _ in names]))
    used_by_any = set().union(*(each for each, _ in gathered))
    for i, group in enumerate(groups):
        if i not in used_by_any:
            known = sorted({name for _, names in gathered for name in names})
            raise UserError(
                f"the parameter group {group.names!r} matches no parameter, or only those of earlier groups\n"
                f"names are such as {', '.join(known[:: max(1, len(known) // 4)][:4])}"
            )
    for chunk in chunks:
        _freeze(chunk, groups)


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
        lr = 0.0 if group.frozen else recipe.lr if group.lr is None else group.lr
        decay = recipe.weight_decay if group.weight_decay is None else group.weight_decay
        lowest = min(recipe.min_lr, recipe.lr) * lr / recipe.lr
        key = ParamKey(predicate=ParamPredicate(f"group {i}", _InGroup(i)))
        out[key] = ParamGroupOverride(max_lr=lr, min_lr=lowest, start_wd=decay, end_wd=decay)
    return out


def zero_frozen_gradients(chunks: Sequence[ModelChunk], groups: Sequence[ParameterGroup]) -> None:
    """Set the gradients of frozen parameters to zero, so that they count neither in the norm nor in the moments."""
    if any(group.frozen for group in groups):
        for _, p in named_parameters(chunks):
            if _is_frozen(p, groups) and p.requires_grad:
                p.main_grad.zero_()  # type: ignore[attr-defined]
