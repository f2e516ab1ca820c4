"""Hugging Face folders from the weights of a run: config.json, safetensors shards, generation and tokenizer files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from attrs import frozen
from safetensors.torch import save_file

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_form import fingerprint
from megaloom.dsl.graph import Model
from megaloom.dsl.hf.architectures import open_config, reader
from megaloom.dsl.hf.conversations import for_conversations, predicts_next_token
from megaloom.dsl.hf.state_dict import to_checkpoint
from megaloom.dsl.hf.stored_names import SHARD_INDEX, SINGLE
from megaloom.dsl.hf.tensor_layout import stored_tensors
from megaloom.dsl.hf.tensor_names import Names
from megaloom.dsl.transforms.packing import packed, reads_tokens
from megaloom.runtime.weights.hugging_face_files import copy_files
from megaloom.runtime.weights.views import View, concatenated

SHARD_NBYTES = 5 * 10**9
"""Most bytes of a file of tensors, unless one tensor is larger, as transformers writes them."""

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
"""Bytes of the units of a size. Those of transformers' max_shard_size are among them."""

NOT_OF_THE_RESULT = ("quantization_config", "torch_dtype", "dtype")


@frozen
class DescribedModel:
    """A config.json that describes a model, and what it says about the tensors."""

    file: Path
    fields: Mapping[str, Any]
    names: Names
    model: Model

    def check(self, model: Model) -> None:
        """Raise UserError unless the config describes a model with the tensors of another one."""
        ours, theirs = ({t.name: t.shape for t in stored_tensors(self.names, m)} for m in (model, self.model))
        differ = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
        if differ:
            name = min(differ)
            raise UserError(
                f"{self.file} describes another model than {model.name!r}: tensor {name} is "
                f"{_shown(theirs.get(name))} by the config, and {_shown(ours.get(name))} in the model"
            )

    def is_exact(self, model: Model) -> bool:
        """Return True if the config describes this model in every detail, dropout included.

        The inputs that conversations and padding need do not count.
        """
        own = fingerprint(model)
        return (
            fingerprint(self.model) == own
            or (reads_tokens(self.model) and fingerprint(packed(self.model)) == own)
            or (predicts_next_token(self.model) and fingerprint(for_conversations(self.model)) == own)
        )


def describe(file: Path) -> DescribedModel:
    """Read a config.json, or the one of a folder. Raise UserError if it cannot be read."""
    config, name = open_config(file)
    return DescribedModel(Path(config.where), dict(config.fields), reader(config).names, reader(config)(config, name))


def nbytes_of(size: str, option: str) -> int:
    """Return the bytes of a size such as 500MB or 2GiB. Raise UserError for another text; `option` names it."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Z]*)", size.strip().upper())
    if not found or found[2] not in UNITS or float(found[1]) * UNITS[found[2]] < 1:
        raise UserError(f"{option} {size} is not a size\ngive a number of bytes, or one with a unit: 500MB, 5GB, 2GiB")
    return int(float(found[1]) * UNITS[found[2]])


def write_folder(
    description: DescribedModel,
    model: Model,
    weights: Mapping[str, View],
    folder: Path,
    dtype: torch.dtype,
    shard_nbytes: int = SHARD_NBYTES,
) -> int:
    """Write a Hugging Face folder, and return the number of its tensors. It is absent until it is whole.

    weights: by the names of `graph(model).weights`; read tensor by tensor, at most one file of them in memory.
    shard_nbytes: most bytes of a file, unless one tensor is larger.
    Raise UserError if the folder exists, or the disk is full.
    """
    tensors = to_checkpoint(description.names, model, weights, concatenated)
    with published(folder) as unfinished:
        _write_tensors(tensors, unfinished, dtype, shard_nbytes)
        fields = {k: v for k, v in description.fields.items() if k not in NOT_OF_THE_RESULT}
        fields["dtype"] = str(dtype).removeprefix("torch.")
        (unfinished / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        copy_files(description.file.parent, unfinished)
    return len(tensors)


@contextmanager
def published(folder: Path) -> Iterator[Path]:
    """Return a folder to write in, which gets its name when all is written. Its name until then is nobody else's."""
    if folder.exists():
        raise UserError(f"{folder} exists\nremove it, or give another folder with -o")
    unfinished = folder.with_name(f"{folder.name}.{token_hex(4)}.tmp")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.rename(folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_tensors(tensors: Mapping[str, View], folder: Path, dtype: torch.dtype, shard_nbytes: int) -> None:
    """Write tensors into one file, or into several and their index."""
    shards = list(_shards(tensors, dtype.itemsize, shard_nbytes))
    names = [SINGLE] if len(shards) == 1 else []
    names = names or [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        values = {key: tensors[key].read().to(dtype).contiguous() for key in shard}
        save_file(values, folder / name, {"format": "pt"})
    if len(shards) > 1:
        place = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total = sum(_numel(view) * dtype.itemsize for view in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": place}
        (folder / SHARD_INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(tensors: Mapping[str, View], itemsize: int, shard_nbytes: int) -> Iterator[list[str]]:
    """Yield the names of the tensors of each file."""
    shard: list[str] = []
    nbytes = 0
    for name, view in tensors.items():
        size = _numel(view) * itemsize
        if shard and nbytes + size > shard_nbytes:
            yield shard
            shard, nbytes = [], 0
        shard.append(name)
        nbytes += size
    yield shard


def _numel(view: View) -> int:
    return torch.Size(view.shape).numel()


def _shown(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))
