"""The weights of a model from a checkpoint of it, as views by the names of `graph(model).weights`.

A checkpoint has the parameters of modules. `modules.parameters` says how they are made of weights; here that is solved
for the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megaloom.dsl import Graph, MoE, Node, Shape, Slot, UserError
from megaloom.runtime.modules.parameters import Weights, parameters
from megaloom.runtime.weights.views import Box, View, concatenated, solve, source

EXPERTS = "experts.local_experts."  # begin of the names of megatron-core's parameters of experts
STACKED = "experts.experts."  # begin of their names in checkpoints, where all experts are one tensor


def weights_of(graph: Graph, tensors: Mapping[str, View]) -> dict[str, View]:
    """Return the weights of a model, from the tensors of a checkpoint of it.

    Raise UserError for a weight that the checkpoint does not have.
    """
    found: dict[tuple[str, int | None], View] = {}
    for node in graph.nodes:
        if node.weights:
            found |= _of_module(node, tensors) | _of_body(node, tensors)
    return {name: _whole(slot, found) for name, slot in graph.weights.items()}


def parameter_shapes(node: Node) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the whole parameters of a node that runs as a module, by name."""
    weights = Weights(_slots(node), _unknown, _experts(node))
    return {name: tuple(x.shape) for name, x in parameters(node.op, weights).items()}


def _experts(node: Node) -> range:
    return range(node.op.experts if isinstance(node.op, MoE) else 0)


def _unknown(slot: Slot, index: int | None) -> View:
    """Return a view that stands for a weight, or one copy of it."""
    dims = slot.dims if index is None else slot.value.shape.dims
    return source([d.known for d in dims], torch.float32, _unread, (slot.name, index))


def _whole(slot: Slot, found: Mapping[tuple[str, int | None], View]) -> View:
    """Return a weight from its value, or from those of its copies."""
    if (whole := found.get((slot.name, None))) is not None:
        return whole
    copies = [found.get((slot.name, i)) for i in range(slot.outer[0].known if slot.outer else 0)]
    present = [view.unsqueeze(0) for view in copies if view is not None]
    if not present or len(present) < len(copies):
        raise UserError(
            f"the checkpoint has no weight {slot.name!r} {Shape(slot.dims)}\n"
            "weights of a layer that has a torch module of its own cannot be converted"
        )
    return concatenated(present, 0)


def _slots(node: Node) -> dict[str, Slot]:
    return {s.name.removeprefix(f"{node.name}."): s for s in node.weights}


def _of_body(node: Node, tensors: Mapping[str, View]) -> dict[tuple[str, int | None], View]:
    """Return those weights of a node that the checkpoint has under their own names: it ran by its body."""
    named = {(s.name, None): (tensors.get(f"{node.name}.{name}"), s) for name, s in _slots(node).items()}
    return {
        key: _unpadded(view, tuple(d.known for d in s.dims)) for key, (view, s) in named.items() if view is not None
    }


def _of_module(node: Node, tensors: Mapping[str, View]) -> dict[tuple[str, int | None], View]:
    """Return the weights of a node that ran as a module, solved from those parameters that the checkpoint has."""

    if parameters.dispatch(type(node.op)) is parameters.dispatch(object):
        return {}  # a layer's own method may compute anything
    found: dict[tuple[str, int | None], View] = {}
    for name, expression in parameters(node.op, Weights(_slots(node), _unknown, _experts(node))).items():
        for value in _stored(tensors, node.name, name):
            found |= solve(expression, _unpadded(value, expression.shape))  # type: ignore[arg-type]
    return found


def _stored(tensors: Mapping[str, View], node: str, name: str) -> Iterator[View]:
    """Yield the tensor of a module's parameter; none if another node has saved it, with which it is shared."""
    if (view := tensors.get(f"{node}.{name}")) is not None:
        yield view
    elif name.startswith(EXPERTS):
        number, _, name = name.removeprefix(EXPERTS).partition(".")
        if (view := tensors.get(f"{node}.{STACKED}{name}")) is not None:
            yield view.select(0, int(number))


def _unpadded(view: View, sizes: tuple[int, ...]) -> View:
    """Return the first `sizes` indices of each dim: those after them pad a sharded dim."""
    for dim, size in enumerate(sizes):
        view = view.narrow(dim, 0, size)
    return view


def _unread(box: Box) -> Tensor:
    raise AssertionError("a weight that is solved for has no values")
