"""The tensors of a Hugging Face folder: safetensors files, one or several with an index, as views.

Nothing is read but the headers of the files until a view is. Quantised tensors are views of their values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import read_json
from megaloom.dsl.hf.stored_names import SHARD_INDEX, SINGLE

from .quantised import dequantised
from .views import Box, View, source

STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@frozen
class TensorFolder:
    """The tensors of a folder by name, and how many of them are dequantised from each format."""

    folder: Path
    tensors: Mapping[str, View]
    quantised: Mapping[str, int]  # format, such as mxfp4 → number of tensors
    not_finite: set[str] = field(factory=set)  # names of tensors in which NaN or an infinite value was read

    def __str__(self) -> str:
        dtypes = sorted({str(view.dtype).removeprefix("torch.") for view in self.tensors.values()})
        formats = "".join(f"; {count} dequantised from {name}" for name, count in self.quantised.items())
        return f"{self.folder} ({len(self.tensors)} tensors of {', '.join(dtypes)}{formats})"


def open_tensors(folder: Path, quantization: Mapping[str, Any] | None = None) -> TensorFolder:
    """Open the safetensors files of a folder.

    quantization: the field `quantization_config` of its config.json. Raise UserError if a file is missing or damaged,
    or the weights are quantised in a format that is not read.
    """
    not_finite = set[str]()
    found = {name: view for file in _files(folder) for name, view in _views(file, not_finite)}
    tensors, quantised = dequantised(found, quantization or {}, folder)
    return TensorFolder(folder, tensors, quantised, not_finite)


def has_tensors(folder: Path) -> bool:
    """Return True if a folder has weights in safetensors files."""
    return (folder / SHARD_INDEX).is_file() or (folder / SINGLE).is_file()


def _files(folder: Path) -> list[Path]:
    """Return the files with the tensors of a folder."""
    if (folder / SHARD_INDEX).is_file():
        try:
            names = sorted(set(read_json(folder / SHARD_INDEX)["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{folder / SHARD_INDEX} is not an index of safetensors files: {error!r:.80}") from None
        if outside := [name for name in names if Path(str(name)).name != name]:
            raise UserError(f"{folder / SHARD_INDEX} names {outside[0]!r}, which is not a file of its folder")
        files = [folder / name for name in names]
    else:
        files = [folder / SINGLE]
    if absent := [file.name for file in files if not file.is_file()]:
        raise UserError(_no_weights(folder, absent))
    return files


def _no_weights(folder: Path, absent: list[str]) -> str:
    if absent == [SINGLE] and (other := sorted(p.name for p in folder.glob("*.bin"))):
        return (
            f"{folder} has no {SINGLE}, but {other[0]}: pickled weights are not read\n"
            "save it as safetensors: model.save_pretrained(FOLDER) in transformers"
        )
    also = f" and {len(absent) - 1} more files" if len(absent) > 1 else ""
    return f"{folder} has no {absent[0]}{also}\nweights are read from {SINGLE}, or from the files in {SHARD_INDEX}"


def _views(file: Path, not_finite: set[str]) -> Iterator[tuple[str, View]]:
    """Yield the tensors of a file by name. not_finite: gets the names of those in which NaN or infinity is read."""
    opened = _open(file)
    for name in opened.keys():  # noqa: SIM118 (it is not a dict)
        header = opened.get_slice(name)
        if header.get_dtype() not in STORED_DTYPES:
            raise UserError(f"{file}: {name} has the type {header.get_dtype()}, which is not read")
        yield name, stored(opened, name, tuple(header.get_shape()), STORED_DTYPES[header.get_dtype()], not_finite)


def stored(opened: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype, not_finite: set[str]) -> View:
    """Return a view of a tensor of an open safetensors file. not_finite: gets its name if NaN or infinity is read."""

    def reader(box: Box) -> Tensor:
        part = opened.get_slice(name)[tuple(slice(r.start, r.stop) for r in box)] if box else opened.get_tensor(name)
        assert isinstance(part, Tensor)
        if dtype.is_floating_point and dtype.itemsize > 1 and not bool(part.isfinite().all()):
            not_finite.add(name)
        return part

    return source(shape, dtype, reader)


def _open(file: Path) -> Any:
    """Return an open safetensors file. Raise UserError if it is damaged."""
    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read {file}: {error}\nit may be truncated; copy or download it again") from None
