"""The weights of a model from a checkpoint of a run, as views by the names of `graph(model).weights`."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from attrs import frozen

from megaloom.dsl import Graph, Model, Shape, UserError, graph
from megaloom.dsl.files.comparison import OptionDifference, differing_options
from megaloom.runtime.checkpoints.checkpoint_folder import Checkpoint
from megaloom.runtime.checkpoints.checkpoint_views import of_kind, tensor_views
from megaloom.runtime.checkpoints.manifest import DECLARED_NAMES
from megaloom.runtime.checkpoints.version_2 import weights_of
from megaloom.runtime.megatron.optimizer_state import AVERAGE
from megaloom.runtime.weights.hugging_face_weights import POSITION_OPTIONS
from megaloom.runtime.weights.views import View

from .adapters import with_merged_adapters

NAMED = 5
"""Weights that a message names."""


@frozen
class RunWeights:
    """The newest checkpoint of a run as the initial weights of another run."""

    folder: Path
    source: Model  # of the run
    checkpoint: Checkpoint

    def __str__(self) -> str:
        return f"{self.folder}, step {self.checkpoint.manifest.step}"

    def check(self, model: Model) -> None:
        """Raise UserError unless a model has the weights of the run, in their shapes, and computes the same of them.

        Dropout and losses may differ; so may positions: see `notes`.
        """
        ours, theirs = _shapes(model.without_adapters), _shapes(self.source.without_adapters)
        if lines := _differing(ours, theirs):
            what = f"--from {self.folder}: its weights are not those of model {model.name!r}"
            raise UserError("\n".join([what, *lines]))
        if wrong := [d for d in self._differences(model) if not d.option.startswith(POSITION_OPTIONS)]:
            raise UserError(
                f"--from {self.folder}: {model.name!r} is not the model of that run: {wrong[0]}\n"
                "omit MODEL to train the run's own model, or correct the option in MODEL"
            )
        checkpoint_weights(graph(self.source), self.checkpoint)

    def notes(self, model: Model) -> list[str]:
        """Return lines about damaged checkpoints, adapters that are merged, and positions that differ."""
        lines = list(self.checkpoint.notes)
        if self.source.lora and not self._has_adapters(model):
            lines.append(f"the adapters of {self.folder} are merged into its weights")
        return lines + [f"MODEL has other positions than {self.folder}: {d}" for d in self._differences(model)]

    def of(self, model: Model) -> dict[str, View]:
        """Return the weights of a model, which `check` has passed. Adapters other than the run's are left out."""
        weights = checkpoint_weights(graph(self.source), self.checkpoint)
        if self.source.lora is None or self._has_adapters(model):
            return weights
        return with_merged_adapters(self.source, weights)

    def _has_adapters(self, model: Model) -> bool:
        """Return whether a model has the adapters of the run."""
        return self.source.lora is not None and model.lora == self.source.lora

    def _differences(self, model: Model) -> list[OptionDifference]:
        return list(differing_options(model.without_adapters, self.source.without_adapters))


def _shapes(model: Model) -> dict[str, Shape]:
    return {name: Shape(slot.dims) for name, slot in graph(model).weights.items()}


def _differing(ours: Mapping[str, Shape], theirs: Mapping[str, Shape]) -> list[str]:
    """Return lines that name weights which the run lacks, has besides, or has in another shape."""
    missing, unknown = [n for n in ours if n not in theirs], [n for n in theirs if n not in ours]
    lines = []
    for what, names, shapes, others in (("missing", missing, ours, unknown), ("unknown", unknown, theirs, missing)):
        for name in names[:NAMED]:
            near = get_close_matches(name, others, 1)
            lines.append(f"{what}: {name} {shapes[name]}" + (f"; the nearest is {near[0]}" if near else ""))
        lines += [f"and {len(names) - NAMED} more are {what}"] if len(names) > NAMED else []
    other = [n for n in ours if n in theirs and _sizes(ours[n]) != _sizes(theirs[n])]
    lines += [f"{name} is {theirs[name]}, not {ours[name]}" for name in other[:NAMED]]
    return lines + ([f"and {len(other) - NAMED} more have another shape"] if len(other) > NAMED else [])


def _sizes(shape: Shape) -> list[int]:
    return [d.known for d in shape]


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
