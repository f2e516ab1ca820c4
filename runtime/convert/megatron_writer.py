"""Checkpoints that Megatron-LM's GPTModel loads under any layout: megatron-core's torch_dist format, with its names.

    ROOT/latest_checkpointed_iteration.txt
    ROOT/iter_0000100/.metadata, __0_0.distcp     weights; those of layers as one tensor, [layers …]
    ROOT/iter_0000100/common.pt, metadata.json    arguments, and the versions of the format

A checkpoint has weights only, without optimizer and random numbers: Megatron-LM loads it with --finetune.
"""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Hashable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from megaloom.dsl import Model, MoE, UserError, graph
from megaloom.runtime.weights.safe_pickle import COMMON
from megaloom.runtime.weights.views import View, concatenated, with_readers

from .hugging_face import published
from .megatron_files import LATEST, RELEASE, RENAMED
from .megatron_names import Family, family_of, megatron_parameters

STACK = "decoder.layers."
WITH_EXTRA_STATE = (
    "self_attention.linear_qkv",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Modules of a layer that have a state beside their weights, with or without Transformer Engine."""
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

    weights: by the names of `graph(model).weights`; read tensor by tensor. Raise UserError for a model that is no dense
    GPTModel, and if the folder exists.
    """
    tensors = stacked_tensors(model, weights)
    with published(folder) as unfinished:
        inside = unfinished / about.folder_name
        inside.mkdir()
        state: dict[str, Any] = {
            name: torch.empty(view.shape, dtype=dtype, device="meta") for name, view in tensors.items()
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
    """Return the tensors of a checkpoint of GPTModel by their names: those of layers as one tensor [layers …]."""
    g = graph(model)
    if family_of(g) is not Family.GPT or any(isinstance(n.op, MoE) for n in g.nodes):
        raise UserError(
            f"--to megatron writes dense decoders (GPTModel) only, and {model.name!r} is another model\n"
            "train it here, or write a Hugging Face folder with --to hf"
        )

    def reader(key: Hashable) -> Any:
        assert isinstance(key, tuple)
        name, index = key
        assert index is None, f"{name} has no copies in a dense decoder"
        return weights[name].read

    out: dict[str, View] = {}
    layers: dict[str, list[View]] = {}
    for p in megatron_parameters(g):
        view = with_readers(p.expression, reader)
        if p.name.startswith(STACK):
            _, _, rest = p.name.removeprefix(STACK).partition(".")
            layers.setdefault(_stored_name(rest), []).append(view.unsqueeze(0))
        else:
            out[p.name] = view
    return out | {f"{STACK}{name}": concatenated(views, 0) for name, views in layers.items()}


def _extra_states(tensors: Mapping[str, View]) -> Iterator[str]:
    """Yield the keys of what modules save beside weights, which Megatron-LM wants to find: here it is None."""
    layers = next(view.shape[0] for name, view in tensors.items() if name.startswith(STACK))
    for module in WITH_EXTRA_STATE:
        yield from (f"{STACK}{module}._extra_state/shard_{i}_{layers}" for i in range(layers))
    yield from (f"{module}._extra_state/shard_0_1" for module in ("decoder.final_layernorm", "output_layer"))


def _stored_name(name: str) -> str:
    """Return the name of a tensor of a layer in a checkpoint: norms have those that Transformer Engine gives them."""
    for stored, plain in RENAMED.items():
        if name.startswith(plain):
            return name.replace(plain, stored)
    return name


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
        return self.tensors[write_item.index.fqn].read().to(self.dtype).contiguous()
