"""Checkpoints of versions 1 and 2, whose tensors are parameters of modules, and so depended on the layout.

`planner.contract.module_kinds` says how a module's parameters are made of weights; here that is solved for the weights,
so such a checkpoint loads under any layout. Megatron-LM names its parameters alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor

from megaloom.dsl import Embed, Graph, Node, Slot, Unembed
from megaloom.dsl.facts.primitives import program
from megaloom.planner.contract.module_kinds import LOCAL_EXPERTS
from megaloom.planner.rules.shared_weights import stored_by_rows
from megaloom.runtime.modules.parameters import Weights, is_built_in, local_slots, parameters
from megaloom.runtime.weights.views import View, concatenated, solve, symbol

STACKED = "experts.experts."  # begin of their names in checkpoints, where all experts are one tensor


class OtherTensorsError(Exception):
    """A tensor that a state needs is missing, or has other sizes."""


def weights_of(graph: Graph, tensors: Mapping[str, View]) -> dict[str, View]:
    """Return the weights of a model that parameters of its modules hold, from all or some of these parameters."""
    found: dict[tuple[str, int | None], View] = {}
    for node in graph.nodes:
        if node.weights:
            found |= _of_module(node, tensors) | _of_body(node, tensors, stored_by_rows(graph))
    return whole_weights(graph, found)


def whole_weights(graph: Graph, found: Mapping[tuple[str, int | None], View]) -> dict[str, View]:
    """Return the weights of a model that are there, whole or in copies: their keys are a name, and a number or None."""
    whole = ((name, _whole(slot, found)) for name, slot in graph.weights.items())
    return {name: view for name, view in whole if view is not None}


def unknown_tensors(graph: Graph, tensors: Mapping[str, View]) -> list[str]:
    """Return the names of tensors that no weight of a model is made of."""
    known = {name for node in graph.nodes for name in _names(node)}
    return sorted(name for name in tensors if name not in known)


def read_shards(state: Mapping[str, Any], tensors: Mapping[str, View], prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a sharded state by its keys, read from views by the names of weights.

    prefix: what names in the state begin with, if they are of a moment. Raise OtherTensorsError for a missing tensor.
    """
    for key, entry in state.items():
        if isinstance(entry, ShardedTensorFactory):
            shards = entry.build()
            found = {i: _read(x, tensors, prefix) for i, x in shards.items() if isinstance(x, ShardedTensor)}
            yield key, entry.merge_fn(found)
        elif isinstance(entry, ShardedTensor):
            yield key, _read(entry, tensors, prefix)


def _read(shard: ShardedTensor, tensors: Mapping[str, View], prefix: str) -> Tensor:
    name = shard.key.removeprefix(prefix)
    if name not in tensors:
        raise OtherTensorsError(f"it has no tensor {shard.key!r}")
    view = tensors[name]
    if view.shape != tuple(shard.global_shape):
        sizes = list(shard.global_shape)
        raise OtherTensorsError(f"its {shard.key} has sizes {list(view.shape)}, that of this model {sizes}")
    local = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    box = tuple(range(o, o + n) for o, n in zip(shard.global_offset, local, strict=True))
    return view.read(box).view(shard.local_shape)


def _names(node: Node) -> Iterator[str]:
    """Yield the names that the tensors of a node may have."""
    yield from (f"{node.name}.{name}" for name in local_slots(node))
    if is_built_in(node.op):
        for name in expressions(node):
            yield f"{node.name}.{name}"
            if name.startswith(LOCAL_EXPERTS):
                yield f"{node.name}.{STACKED}{name.removeprefix(LOCAL_EXPERTS).partition('.')[2]}"


def expressions(node: Node) -> Mapping[str, Any]:
    """Return the whole parameters of a node's module as rearrangements of what `stored_weight` returns."""
    return parameters(node.op, Weights.of(node, stored_weight))


def stored_weight(slot: Slot, index: int | None) -> View:
    """Return a view that stands for a weight, or one copy of it."""
    dims = slot.dims if index is None else slot.value.shape.dims
    return symbol([d.known for d in dims], (slot.name, index))


def _whole(slot: Slot, found: Mapping[tuple[str, int | None], View]) -> View | None:
    """Return a weight from its value, or from those of its copies."""
    if (whole := found.get((slot.name, None))) is not None:
        return whole
    copies = [found.get((slot.name, i)) for i in range(slot.outer[0].known if slot.outer else 0)]
    present = [view.unsqueeze(0) for view in copies if view is not None]
    return concatenated(present, 0) if present and len(present) == len(copies) else None


def _of_body(node: Node, tensors: Mapping[str, View], by_rows: frozenset[str]) -> dict[tuple[str, int | None], View]:
    """Return those weights of a node that the checkpoint has under their own names: it ran by its body.

    by_rows: shared weights that were stored with `embed` last, in whichever order they were declared.
    """
    out: dict[tuple[str, int | None], View] = {}
    for name, slot in local_slots(node).items():
        if (view := tensors.get(f"{node.name}.{name}")) is not None:
            view = view.T if slot.name in by_rows and slot.dims[-1].name != "embed" else view
            table = program(node).table.dims
            padded = {i for i, d in enumerate(slot.dims) if d.name in table and table[d.name].policy == "pad"}
            if (whole := unpadded(view, tuple(d.known for d in slot.dims), padded)) is not None:
                out[slot.name, None] = whole
    return out


def _of_module(node: Node, tensors: Mapping[str, View]) -> dict[tuple[str, int | None], View]:
    """Return the weights of a node that ran as a module, solved from those parameters that the checkpoint has."""
    if not is_built_in(node.op):
        return {}  # a layer's own method may compute anything
    found: dict[tuple[str, int | None], View] = {}
    for name, expression in expressions(node).items():
        padded = {0} if isinstance(node.op, Embed | Unembed) else set()
        for value in _stored(tensors, node.name, name):
            if (whole := unpadded(value, expression.shape, padded)) is not None:
                found |= solve(expression, whole)  # type: ignore[arg-type]
    return found


def _stored(tensors: Mapping[str, View], node: str, name: str) -> Iterator[View]:
    """Yield the tensor of a module's parameter; none if another node has saved it, with which it is shared."""
    if (view := tensors.get(f"{node}.{name}")) is not None:
        yield view
    elif name.startswith(LOCAL_EXPERTS):
        number, _, name = name.removeprefix(LOCAL_EXPERTS).partition(".")
        if (view := tensors.get(f"{node}.{STACKED}{name}")) is not None:
            yield view.select(0, int(number))


def unpadded(view: View, sizes: tuple[int, ...], padded: Collection[int]) -> View | None:
    """Return a tensor without its padding; None if it has other sizes. padded: dims that may have padding."""
    fits = view.ndim == len(sizes) and all(
        have == want or (have > want and i in padded)
        for i, (have, want) in enumerate(zip(view.shape, sizes, strict=True))
    )
    if not fits:
        return None
    for dim, size in enumerate(sizes):
        view = view.narrow(dim, 0, size)
    return view
