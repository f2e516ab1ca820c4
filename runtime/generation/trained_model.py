"""A trained model to generate from: a run's folder, or a Hugging Face folder, with its tokenizer and special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from megaloom.dsl import Graph, UserError, graph
from megaloom.dsl.files.json_file import read_json
from megaloom.dsl.graph import Model
from megaloom.dsl.hf.architectures import read
from megaloom.planner.contract.workload import Precision
from megaloom.runtime.checkpoints.checkpoint_folder import Checkpoint, newest_intact
from megaloom.runtime.convert.run_weights import checkpoint_weights
from megaloom.runtime.data.token_ids import BYTE_IDS
from megaloom.runtime.data.tokenizer import tokenizer_of
from megaloom.runtime.megatron import device
from megaloom.runtime.modules.initial_weights import GivenValues
from megaloom.runtime.training.run_folder import (
    PLAN_NAME,
    TOKENIZER_NAME,
    UNKNOWN_TOKENIZER,
    file_of_run,
    is_run,
    no_checkpoint,
    plan_and_model,
)
from megaloom.runtime.weights.hugging_face_files import CONFIG, HF_FOLDER
from megaloom.runtime.weights.hugging_face_weights import open_folder

FILES = ("config.json", "generation_config.json")
"""Hugging Face files with special tokens; those of a later file have precedence."""


@frozen
class TrainedModel:
    """A folder with a trained model."""

    folder: Path
    precision: Precision  # that it was trained in
    checkpoint: Checkpoint | None = None  # of a run
    averaged: bool = False  # with its averaged weights

    @property
    def is_run(self) -> bool:
        """Return whether the folder is that of a run."""
        return self.checkpoint is not None

    @property
    def model(self) -> Model:
        """Return the model."""
        return plan_and_model(self.folder)[1] if self.is_run else read(self.folder)

    @property
    def graph(self) -> Graph:
        """Return the model's graph."""
        return graph(self.model)

    @property
    def tokenizer(self) -> str:
        """Return the folder of the tokenizer, or "bytes"."""
        folders = (self.folder / TOKENIZER_NAME, self.folder / HF_FOLDER) if self.is_run else (self.folder,)
        return tokenizer_of(folders)

    @property
    def has_tokenizer(self) -> bool:
        """Return whether the tokenizer is known: a folder, or the bytes that a run was trained on."""
        if self.tokenizer != BYTE_IDS.name:
            return True
        file = file_of_run(self.folder)
        return file.tokenizer != UNKNOWN_TOKENIZER if file else self.is_run

    def special(self, name: str) -> tuple[int, ...]:
        """Return the ids of a special token, such as eos_token_id, by the Hugging Face files; none if they lack it."""
        found: Any = None
        for file in FILES:
            path = (self.folder / HF_FOLDER if self.is_run else self.folder) / file
            if path.is_file():
                found = _fields(path).get(name, found)
        ids = found if isinstance(found, list) else [found]
        return tuple(i for i in ids if isinstance(i, int))

    def check(self) -> None:
        """Raise UserError if a folder does not have these weights."""
        if self.checkpoint is None:
            open_folder(self.folder).check(self.model)
        else:
            checkpoint_weights(self.graph, self.checkpoint, averaged=self.averaged)

    def weights(self) -> GivenValues:
        """Return the weights as views, after `check`."""
        if self.checkpoint is None:
            return open_folder(self.folder).of(self.model)
        return checkpoint_weights(self.graph, self.checkpoint, averaged=self.averaged)


def open_trained(folder: Path, *, averaged: bool = False) -> TrainedModel:
    """Return the trained model in a folder. Raise UserError if there is none.

    averaged: with the averaged weights of the last checkpoint of a run.
    """
    if (folder / PLAN_NAME).is_file() or is_run(folder):
        plan, _ = plan_and_model(folder)
        checkpoint = newest_intact(folder, fingerprint=plan.fingerprint)
        if checkpoint is None:
            raise no_checkpoint(folder)
        return TrainedModel(folder, plan.workload.precision, checkpoint, averaged)
    if (folder / CONFIG).is_file():
        if averaged:
            raise UserError(f"{folder} is a Hugging Face folder, which has no averaged weights\nomit --averaged")
        return TrainedModel(folder, Precision.BF16 if device.gpu_count() else Precision.FP32)
    if folder.is_file():
        raise UserError(f"{folder} is a file, not the folder of a run\nunpack it: megaloom unpack {folder}")
    what = "is not a run folder" if folder.is_dir() else "does not exist"
    raise UserError(f"{folder} {what}\ngive the folder that `megaloom train` wrote, or a Hugging Face folder")


def _fields(path: Path) -> Mapping[str, Any]:
    """Return the fields of a JSON file. Raise UserError if it is damaged."""
    try:
        fields = read_json(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    return fields if isinstance(fields, dict) else {}
