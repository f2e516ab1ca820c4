"""Checkpoints that Megatron-LM's GPTModel, BertModel and T5Model load under any layout, in torch_dist format.

    ROOT/latest_checkpointed_iteration.txt
    ROOT/iter_0000100/.metadata, __0_0.distcp     weights; those of equal layers as one tensor, [layers …],
                                                  and those of experts as one, [layers experts …]
    ROOT/iter_0000100/common.pt, metadata.json    arguments, and the versions of the format

A checkpoint has weights only, without optimizer and random numbers: Megatron-LM loads it with --finetune.
"""

from __future__ import annotations

import re
import warnings
from argparse import Namespace
from collections.abc import Hashable, Iterator, Mapping
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from megaloom.dsl import Attention, Model, MoE, graph
from megaloom.runtime.weights.safe_pickle import COMMON
from megaloom.runtime.weights.views import View, concatenated, held, with_readers

from .hugging_face import published
from .megatron_files import EXPERT, LATEST, LAYER, RELEASE, RENAMED
from .megatron_names import LEFT_OUT, Family, family_of, megatron_parameters

WITH_EXTRA_STATE = ("linear_", "output_layer", "layernorm")
"""Parts of the names of modules that have a state beside their weights, with or without Transformer Engine."""
SEPARATE_NORM = "pre_mlp_layernorm."
"""The norm before experts, as Transformer Engine's modules store it; megatron-core's own join it with a matrix."""
HEAD_OF_T5 = "lm_head.output_layer."
IN_FLOAT32 = "router.expert_bias"
SENTENCE_CLASSES, HEAD_STD = 2, 0.02
"""Classes of BERT's head for the next sentence, which the model does not have, and the deviation of its weights."""
CHECKPOINT_VERSION = 3.0
"""Megatron-LM's version of the order of rows, which is that of megatron-core."""


@frozen
class MegatronCheckpoint:
    """The arguments of Megatron-LM that are written beside weights, and the iteration; None for a release."""

    arguments: Mapping[str, object]
    iteration: int | None

    @property
    def folder_name(self) -> str:
        """Return the name of the checkpoint's folder in that of all checkpoints."""
        return RELEASE if self.iteration is None else f"iter_{self.iteration:07d}"


def write_megatron(
    model: Model, weights: Mapping[str, View], folder: Path, dtype: torch.dtype, about: MegatronCheckpoint
) -> int:
    """Write a checkpoint of Megatron-LM, and return the number of its tensors. The folder is absent until it is whole.

    weights: by the names of `graph(model).weights`; read tensor by tensor. Raise UserError for a model with layers that
    GPTModel, BertModel and T5Model do not have, and if the folder exists.
    """
    tensors = dict(_padded(stacked_tensors(model, weights), about.arguments))
    with published(folder) as unfinished:
        inside = unfinished / about.folder_name
        inside.mkdir()
        state: dict[str, Any] = {
            name: torch.empty(view.shape, dtype=_dtype(name, dtype), device="meta") for name, view in tensors.items()
        }
        state |= dict.fromkeys(_extra_states(tensors))
        writer = FileSystemWriter(inside, single_file_per_rank=True, sync_files=False, thread_count=1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as asked for
            save(state, storage_writer=writer, planner=_ReadingPlanner(tensors, dtype), no_dist=True)
        iteration = about.iteration or 0
        args = Namespace(**about.arguments, ckpt_format="torch_dist", params_dtype=dtype)
        args.tensor_model_parallel_size = args.pipeline_model_parallel_size = 1
        args.iteration, args.consumed_train_samples, args.consumed_valid_samples = iteration, 0, 0
        common = {"args": args, "checkpoint_version": CHECKPOINT_VERSION, "iteration": iteration}
        torch.save(common, inside / COMMON)
        save_config(CheckpointingConfig("torch_dist"), str(inside))
        (unfinished / LATEST).write_text(RELEASE if about.iteration is None else str(about.iteration), encoding="utf-8")
    return len(tensors)


def stacked_tensors(model: Model, weights: Mapping[str, View]) -> dict[str, View]:
    """Return the tensors of a checkpoint by their names: those of experts as one, and those of equal layers.

    Layers are not joined if some of them have experts and others do not.
    """
    g = graph(model)

    def reader(key: Hashable) -> Any:
        assert isinstance(key, tuple)
        name, index = key
        return (weights[name] if index is None else weights[name].select(0, index)).read

    parameters = megatron_parameters(g)
    tensors = {p.name: with_readers(p.expression, reader) for p in parameters}
    tensors |= _twice(family_of(g), tensors)
    norms = {p.name.partition("mlp.")[0] + SEPARATE_NORM for p in parameters if isinstance(p.node.op, MoE)}
    separate = {name: view for name, view in tensors.items() if name.startswith(tuple(norms))}
    out = _joined({_stored_name(name): view for name, view in tensors.items()} | separate, EXPERT)
    blocks = sum(isinstance(n.op, Attention) for n in g.nodes)
    return out if 0 < len(norms) < blocks else _joined(out, LAYER)


def _twice(family: Family, tensors: Mapping[str, View]) -> dict[str, View]:
    """Return the tensors that a model has besides: T5's under second names, and BERT's head for the next sentence."""
    if family is Family.T5:
        inside = {n.partition(".")[2]: x for n, x in tensors.items() if n.startswith(("embedding.", "lm_head."))}
        return {name: view for name, view in inside.items() if name.startswith(LEFT_OUT[family])}
    if family is Family.GPT or not any(name.startswith("embedding.tokentype") for name in tensors):
        return {}
    embed = tensors["encoder.final_layernorm.weight"].shape[0]
    random = torch.Generator().manual_seed(0)
    shapes = {"pooler.dense": (embed, embed), "binary_head": (SENTENCE_CLASSES, embed)}
    drawn = {f"{name}.weight": torch.randn(s, generator=random) * HEAD_STD for name, s in shapes.items()}
    drawn |= {f"{name}.bias": torch.zeros(s[0]) for name, s in shapes.items()}
    return {name: held(x) for name, x in drawn.items()}


def _padded(tensors: Mapping[str, View], arguments: Mapping[str, object]) -> Iterator[tuple[str, View]]:
    """Yield the tensors of a checkpoint, T5's logits with zeros for the padding of the vocabulary.

    Megatron-core loads any other table with other padding than it has in the checkpoint.
    """
    for name, view in tensors.items():
        if name.startswith(HEAD_OF_T5):
            rows = arguments["padded_vocab_size"] - view.shape[0]  # type: ignore[operator]
            view = concatenated([view, view.new_zeros(rows, *view.shape[1:])], 0)
        yield name, view


def _joined(tensors: Mapping[str, View], numbered: re.Pattern[str]) -> dict[str, View]:
    """Return tensors without the number that a pattern finds in their names: those of all numbers are one tensor."""
    out: dict[str, list[View]] = {}
    for name, view in tensors.items():
        found = numbered.fullmatch(name)
        if found and found["number"]:
            name, view = f"{found['before']}{found['rest']}", view.unsqueeze(0)
        out.setdefault(name, []).append(view)
    return {name: concatenated(views, 0) for name, views in out.items()}


def _extra_states(tensors: Mapping[str, View]) -> Iterator[str]:
    """Yield the keys of what modules save beside weights, which Megatron-LM wants to find: here it is None."""
    grids: dict[str, tuple[int, ...]] = {"output_layer": ()}
    for name, view in tensors.items():
        module = name.rpartition(".")[0]
        is_layer, is_expert = LAYER.fullmatch(name), EXPERT.fullmatch(name)
        dims = (is_layer is not None and not is_layer["number"]) + (is_expert is not None)
        if any(part in module.rpartition(".")[2] for part in WITH_EXTRA_STATE):
            grids[module] = view.shape[:dims]
            if "attention." in module:
                grids[f"{module.rpartition('.')[0]}.core_attention"] = view.shape[:dims]
    for module, sizes in grids.items():
        for place in product(*map(range, sizes or (1,))):
            yield f"{module}._extra_state/shard_{'.'.join(map(str, place))}_{'.'.join(map(str, sizes or (1,)))}"


def _stored_name(name: str) -> str:
    """Return the name of a tensor in a checkpoint: norms have those that Transformer Engine gives them."""
    for stored, plain in RENAMED.items():
        name = name.replace(plain, stored)
    return name


def _dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a tensor in a checkpoint whose tensors are of another type where they may."""
    return torch.float32 if name.endswith(IN_FLOAT32) else dtype


class _ReadingPlanner(DefaultSavePlanner):
    """A plan for tensors without values, which are read when they are written."""

    def __init__(self, tensors: Mapping[str, View], dtype: torch.dtype) -> None:
        super().__init__()
        self.tensors, self.dtype = tensors, dtype

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        """Return the values of a tensor; for an extra state None, in a list, as megatron-core saves objects."""
        if write_item.type is WriteItemType.BYTE_IO:
            torch.save([None], buffer := BytesIO())
            return buffer
        name = write_item.index.fqn
        return self.tensors[name].read().to(_dtype(name, self.dtype)).contiguous()
