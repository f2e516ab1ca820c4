"""The weights of a model from a Hugging Face folder, as views by the names of `graph(model).weights`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.comparison import OptionDifference, differing_options
from megaloom.dsl.graph import Model
from megaloom.dsl.hf.architectures import open_config, read, reader
from megaloom.dsl.hf.state_dict import from_checkpoint
from megaloom.dsl.hf.stored_names import SINGLE
from megaloom.dsl.hf.tensor_check import check_tensors, check_values
from megaloom.dsl.hf.tensor_names import Names

from .tensor_folder import TensorFolder, open_tensors
from .views import View, concatenated

POSITION_OPTIONS = ("rope", "positions")  # options that a user may change on purpose
MEGATRON_FILES = ("latest_checkpointed_iteration.txt", ".metadata", "mp_rank_*")
"""Files of a checkpoint of Megatron-LM, and of a folder with several."""

COMPARED = 1 << 22  # elements that are compared at a time


@frozen
class HuggingFaceWeights:
    """The tensors of a Hugging Face folder, with the names that its config.json gives them."""

    files: TensorFolder
    names: Names
    described: Model | None  # by the config.json
    unread: str = ""  # why the config.json describes no model, if it does not

    def __str__(self) -> str:
        return str(self.files)

    def check(self, model: Model) -> None:
        """Raise UserError unless a model has these tensors, in their shapes, and the options of the config.json.

        Tensors that repeat another one are read. Positions may differ: see `notes`.
        """
        try:
            model = model.without_adapters
            check_tensors(self.names, model, {name: view.shape for name, view in self.files.tensors.items()})
            check_values(self.names, model, self.files.tensors, equal)
        except UserError as error:
            raise UserError(f"--from {self.files.folder}: {error}") from None
        if wrong := [d for d in self._differences(model) if not d.option.startswith(POSITION_OPTIONS)]:
            raise UserError(
                f"--from {self.files.folder}: {model.name!r} is not the model of its config.json: {wrong[0]}\n"
                "give that folder as MODEL, or correct the option in MODEL"
            )

    def notes(self, model: Model) -> list[str]:
        """Return what a user should know of options that are not compared, or may differ.

        Positions may be changed to train on longer texts.
        """
        notes = [f"MODEL has other positions than {self.files.folder}: {d}" for d in self._differences(model)]
        return [f"the options of MODEL are not compared with those of --from: {self.unread}"] if self.unread else notes

    def _differences(self, model: Model) -> list[OptionDifference]:
        described = self.described
        return [] if described is None else list(differing_options(model.without_adapters, described))

    def of(self, model: Model) -> dict[str, View]:
        """Return the weights of a model, which `check` has passed, without those of adapters."""
        return from_checkpoint(self.names, model.without_adapters, self.files.tensors, concatenated)


def open_folder(folder: str | Path) -> HuggingFaceWeights:
    """Open a Hugging Face folder: config.json and safetensors files. Raise UserError if they cannot be read."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"--from {folder}: no such folder\ngive a folder with config.json and {SINGLE}")
    if is_megatron(folder):
        raise UserError(
            f"{folder} is a checkpoint of Megatron-LM\n"
            f"convert it first: megaloom convert {folder} --to hf --config config.json -o FOLDER"
        )
    config, _ = open_config(folder)
    quantization = config.fields.get("quantization_config")
    files = open_tensors(folder, quantization if isinstance(quantization, Mapping) else None)
    try:
        described, unread = read(folder), ""
    except UserError as error:
        described, unread = None, str(error).partition("\n")[0]
    return HuggingFaceWeights(files, reader(config).names, described, unread)


def is_megatron(folder: Path) -> bool:
    """Return True for the folder of a checkpoint of Megatron-LM, or the folder with several."""
    return any(path for pattern in MEGATRON_FILES for path in folder.glob(pattern))


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
