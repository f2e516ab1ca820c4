"""Low-rank adapters of a run: merged into the weights, or written in the format of PEFT."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model, graph
from megaloom.dsl.hf.adapter_tensors import adapted_modules, adapter_config
from megaloom.dsl.hf.state_dict import joined
from megaloom.dsl.hf.tensor_names import Names
from megaloom.dsl.node import Slot
from megaloom.dsl.transforms.adapters import RANK, adapter_slots
from megaloom.runtime.weights.views import Box, View, concatenated, source

from .hugging_face import published

ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"


def with_merged_adapters(model: Model, weights: Mapping[str, View]) -> dict[str, View]:
    """Return the weights of a model's base, with W + (alpha / rank) A B where it has adapters.

    They are computed in fp32 as they are read.
    """
    slots = graph(model.without_adapters).weights
    out = {name: weights[name] for name in slots}
    for it in adapter_slots(model):
        for name, b in zip(it.weights, it.b, strict=True):
            out[name] = _sum(model, slots[name], it.a, b, weights)
    return out


def _sum(model: Model, w: Slot, a: Slot, b: Slot, weights: Mapping[str, View]) -> View:
    """Return a view of one matrix with its adapters added."""
    lora = model.lora
    assert lora is not None
    inputs, outputs = ([d.name for d in s.dims if d.name != RANK] for s in (a, b))
    order = [[*inputs, *outputs].index(d.name) for d in w.dims]

    def reader(box: Box) -> Tensor:
        parts = dict(zip((d.name for d in w.dims), box, strict=True)) | {RANK: range(lora.rank)}
        read_a, read_b = (weights[s.name].read(tuple(parts[d.name] for d in s.dims)).float() for s in (a, b))
        product = read_a.flatten(0, -2) @ read_b.flatten(1)
        sizes = [len(parts[name]) for name in (*inputs, *outputs)]
        return weights[w.name].read(box).float() + lora.scale * product.view(sizes).permute(order)

    return source(tuple(d.known for d in w.dims), torch.float32, reader)


def write_adapters(
    names: Names, model: Model, weights: Mapping[str, View], folder: Path, dtype: torch.dtype, base: str | None
) -> int:
    """Write the adapters of a model as PEFT does, and return the number of tensors. The folder is absent until whole.

    names: the tensor names of the model's family. base: the folder or name of the model without adapters. Raise
    UserError for a model without adapters, and if the folder exists.
    """
    if model.lora is None:
        raise UserError(f"the run has no low-rank adapters: its model {model.name!r} was trained whole\nuse --to hf")
    fields = {**adapter_config(names, model), "base_model_name_or_path": base}
    tensors = dict(_tensors(names, model, weights, dtype))
    with published(folder) as unfinished:
        save_file(tensors, unfinished / ADAPTER_TENSORS, {"format": "pt"})
        (unfinished / ADAPTER_CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
    return len(tensors)


def _tensors(
    names: Names, model: Model, weights: Mapping[str, View], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for module in adapted_modules(names, model):
        for t in (module.a, module.b):
            yield t.name, joined(weights, t, concatenated).read().to(dtype).contiguous()
