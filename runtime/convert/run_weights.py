"""The weights of a model from a checkpoint of a run, as views by the names of `graph(model).weights`."""

from __future__ import annotations

from collections.abc import Mapping

from megaloom.dsl import Graph, Shape, UserError
from megaloom.runtime.checkpoints.checkpoint_folder import Checkpoint
from megaloom.runtime.checkpoints.checkpoint_views import of_kind, tensor_views
from megaloom.runtime.checkpoints.manifest import DECLARED_NAMES
from megaloom.runtime.checkpoints.version_2 import weights_of
from megaloom.runtime.megatron.optimizer_state import AVERAGE
from megaloom.runtime.weights.views import View


def checkpoint_weights(graph: Graph, checkpoint: Checkpoint, *, averaged: bool = False) -> dict[str, View]:
    """Return the weights of a model from a checkpoint of it, by the names of `graph(model).weights`.

    averaged: those of trained weights are the averages that a loop of one's own has kept. Raise UserError if there are
    none, or the checkpoint lacks a weight.
    """
    tensors = tensor_views(checkpoint.folder)
    if averaged:
        checkpoint.check_averaged()
        tensors |= of_kind(tensors, AVERAGE)
    found = tensors if checkpoint.manifest.version >= DECLARED_NAMES else weights_of(graph, tensors)
    return {name: _weight(name, Shape(slot.dims), found) for name, slot in graph.weights.items()}


def _weight(name: str, shape: Shape, found: Mapping[str, View]) -> View:
    if name not in found:
        raise UserError(
            f"the checkpoint has no weight {name!r} {shape}\n"
            "weights of a layer that has a torch module of its own cannot be converted"
        )
    return found[name]
