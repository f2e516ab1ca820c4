"""The weights of a model from a Hugging Face folder, as views by the names of `graph(model).weights`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model
from megaloom.dsl.hf.architectures import open_config, reader
from megaloom.dsl.hf.state_dict import from_checkpoint
from megaloom.dsl.hf.tensor_check import check_tensors, check_values
from megaloom.dsl.hf.tensor_names import Names

from .tensor_folder import SINGLE, TensorFolder, open_tensors
from .views import View, concatenated

COMPARED = 1 << 22  # elements that are compared at a time


@frozen
class GivenWeights:
    """The tensors of a Hugging Face folder, with the names that its config.json gives them."""

    files: TensorFolder
    names: Names

    def check(self, model: Model) -> None:
        """Raise UserError unless a model has these tensors, in their shapes. Read those that repeat another one."""
        try:
            model = model.without_adapters
            check_tensors(self.names, model, {name: view.shape for name, view in self.files.tensors.items()})
            check_values(self.names, model, self.files.tensors, equal)
        except UserError as error:
            raise UserError(f"--from {self.files.folder}: {error}") from None

    def of(self, model: Model) -> dict[str, View]:
        """Return the weights of a model, which `check` has passed, without those of adapters."""
        return from_checkpoint(self.names, model.without_adapters, self.files.tensors, concatenated)


def open_folder(folder: Path) -> GivenWeights:
    """Open a Hugging Face folder: config.json and safetensors files. Raise UserError if they cannot be read."""
    if not folder.is_dir():
        raise UserError(f"--from {folder}: no such folder\ngive a folder with config.json and {SINGLE}")
    config, _ = open_config(folder)
    quantization = config.fields.get("quantization_config")
    files = open_tensors(folder, quantization if isinstance(quantization, Mapping) else None)
    return GivenWeights(files, reader(config).names)


def equal(x: View, y: View | None) -> bool:
    """Return True if two views have equal shapes and values, or if x is zero and y is None. They are read in parts."""
    if y is not None and x.shape != y.shape:
        return False
    x, other = x.reshape(-1), y.reshape(-1) if y is not None else None
    for start in range(0, x.shape[0], COMPARED):
        part = (range(start, min(start + COMPARED, x.shape[0])),)
        values = x.read(part)
        if not torch.equal(values, torch.zeros_like(values) if other is None else other.read(part)):
            return False
    return True
