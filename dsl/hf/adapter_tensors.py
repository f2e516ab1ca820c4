"""Adapters in the form of PEFT: the tensors A and B of each module, and the fields of adapter_config.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Model
from megaloom.dsl.node import Slot
from megaloom.dsl.transforms.adapters import RANK, AdapterSlots, adapter_slots

from .lora_targets import WEIGHT, matrix_modules
from .tensor_layout import StoredTensor, weight_layout
from .tensor_names import Axes, Names, Part, Square, Tensor, axis_parts, checkpoint_tensors

PREFIX = "base_model.model."  # of names in adapter_model.safetensors


@frozen
class AdaptedModule:
    """A module of a Hugging Face model with adapters: its path, its tensors A [rank, in] and B [out, rank]."""

    path: str
    a: StoredTensor
    b: StoredTensor
    stores_inputs_first: bool  # the module's own weight is [in, out], as in GPT-2


def adapted_modules(names: Names, model: Model) -> Iterator[AdaptedModule]:
    """Yield the modules with adapters of a model. Raises UserError for adapters that are no module of this family."""
    left = {it.weights: it for it in adapter_slots(model)}
    for t in checkpoint_tensors(names, model.without_adapters):
        it = left.pop(tuple(s.name for s in t.slots), None)
        if it is not None:
            yield _module(t, it)
    if left:
        (first, *_) = left
        raise UserError(
            f"PEFT cannot hold adapters of {', '.join(first)}, which Hugging Face stores as a part of a larger matrix\n"
            "convert with --to hf, which merges adapters into the weights"
        )


def adapter_config(names: Names, model: Model) -> dict[str, Any]:
    """Return the fields of adapter_config.json, as PEFT reads them."""
    lora = model.lora
    assert lora is not None
    modules = list(adapted_modules(names, model))
    paths = {m.path for m in modules}
    matched = {m.path for m in matrix_modules(model.without_adapters, names) if any(map(m.is_named, lora.targets))}
    return {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets) if matched == paths else sorted(paths),
        "fan_in_fan_out": any(m.stores_inputs_first for m in modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def _module(t: Tensor, it: AdapterSlots) -> AdaptedModule:
    """Return the module with one tensor of the checkpoint, of which `it` are the adapters."""
    path = t.name.removesuffix(WEIGHT)
    inputs = {d.name for d in it.a.dims if d.name != RANK}
    dims = [_dims(axis, t) for axis in t.axes]
    read = next((i for i, names in enumerate(dims) if names == inputs), None)
    if len(dims) != 2 or read is None:
        raise UserError(
            f"PEFT cannot hold adapters of {path}: it is not stored as a matrix of inputs and outputs\n"
            "convert with --to hf, which merges adapters into the weights"
        )
    return AdaptedModule(
        path,
        _tensor(f"{PREFIX}{path}.lora_A{WEIGHT}", (it.a,), (RANK, t.axes[read])),
        _tensor(f"{PREFIX}{path}.lora_B{WEIGHT}", it.b, (t.axes[1 - read], RANK)),
        stores_inputs_first=read == 0,
    )


def _dims(axis: Part | Square | tuple[Part, ...], t: Tensor) -> set[str]:
    """Return the dims of the first weight of a tensor that lie on one of its axes."""
    named = {part for other in t.axes for part in axis_parts(other) if isinstance(part, str)}
    own = {part for part in axis_parts(axis) if isinstance(part, str)}
    return own | ({d.name for d in t.slots[0].dims} - named if ... in axis_parts(axis) else set())


def _tensor(name: str, slots: tuple[Slot, ...], axes: Axes) -> StoredTensor:
    return StoredTensor(name, slots, tuple(weight_layout(axes, s, None) for s in slots), None)
