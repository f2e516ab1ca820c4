"""The tensors that a checkpoint has on disk: of a run, of torch_dist, of Megatron-LM, or of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.runtime.checkpoints.checkpoint_views import tensor_views
from megaloom.runtime.weights.hugging_face_weights import is_megatron
from megaloom.runtime.weights.safe_pickle import METADATA
from megaloom.runtime.weights.tensor_folder import has_tensors, open_tensors
from megaloom.runtime.weights.views import View

from .megatron_files import megatron_tensors


@frozen
class StoredTensor:
    """Name, sizes and type of a tensor on disk."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """Return the tensors in the folder of a checkpoint, in the order of their names. No values are read.

    Those of the files of Megatron-LM's ranks are joined. Raise UserError for a folder without tensors.
    """
    views = _views(folder)
    named = sorted(views.items())
    return [StoredTensor(name, view.shape, str(view.dtype).removeprefix("torch.")) for name, view in named]


def _views(folder: Path) -> Mapping[str, View]:
    if (folder / METADATA).is_file():
        return tensor_views(folder)
    if has_tensors(folder):
        return open_tensors(folder).tensors
    if is_megatron(folder):
        return megatron_tensors(folder, gated=False)
    what = "has no tensors" if folder.is_dir() else "is not a folder"
    raise UserError(
        f"{folder} {what}\ngive a run, one of its step-… folders, a Hugging Face folder with safetensors, or a "
        "checkpoint of Megatron-LM"
    )
