"""Loading the state of all ranks, through megatron.core.dist_checkpointing, and saving it at once.

`checkpoint_folder` describes a checkpoint on disk; `saver` saves while training goes on. Only ranks import this file:
`device.prepare` must run before.
"""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megaloom.dsl.graph import Graph
from megaloom.runtime.launch.agreement import agreed, gathered
from megaloom.runtime.megatron.optimizer_state import AVERAGE, MODEL, MOMENTS
from megaloom.runtime.weights.safe_pickle import check_files, only_weights, read_metadata

from .checkpoint_folder import (
    Checkpoint,
    CheckpointError,
    Retention,
    changed_files,
    damaged_contents,
    first_sentence,
    latest,
    newest_intact,
    other_tensors,
    unusable,
)
from .checkpoint_views import of_kind, tensor_views
from .manifest import DECLARED_NAMES, Manifest
from .saver import Saver, Stateful
from .version_2 import OtherTensorsError, read_shards, unknown_tensors, weights_of

DEFAULT_RETENTION = Retention()
DAMAGE = (EOFError, UnpicklingError, AssertionError, KeyError, ValueError, zipfile.BadZipFile)
"""Errors of torch for files that do not hold the tensors that the metadata of the checkpoint name."""
FROM_TORCH_READER = ("PytorchStreamReader", "zip archive", "Invalid magic number", "Invalid protocol")
ONCE_MORE = "its files are as they were saved: run the same command again, or choose another folder with --out"


def save(engine: Stateful, run: Path, manifest: Manifest, retention: Retention = DEFAULT_RETENTION) -> Path:
    """Save the state of all ranks as run/step-…, then remove what is not kept. Every rank calls it.

    Raise CheckpointError on all ranks if the checkpoint cannot be written.
    """
    saver = Saver(run, retention)
    saver.start(engine, manifest)
    saved = saver.finish()
    assert saved
    return saved.folder


def newest_on_ranks(run: Path, *, fingerprint: str) -> Checkpoint | None:
    """Return the newest checkpoint whose files are as they were saved, or None if there is none. Every rank calls it.

    Rank 0 chooses; each rank reads some of the files. Checkpoints that cannot be used are in `skipped`. Raise
    CheckpointError on all ranks if there are none but such, or they belong to another model.
    """
    return newest_intact(run, fingerprint=fingerprint, find=_latest_on_ranks, changed=_changed_on_ranks)


def load(engine: Stateful, checkpoint: Checkpoint) -> None:
    """Load a checkpoint, saved under any layout, into the engine's own layout. Every rank calls it.

    Raise CheckpointError on all ranks if its tensors are not those of the engine or cannot be read, UserError if a file
    could run code. Its bytes are not checked: `newest_on_ranks` does.
    """
    check_files(checkpoint.folder)
    wanted = engine.sharded_state(loading=True)
    with only_weights(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # megatron-core calls torch by an old name
        if checkpoint.manifest.version < DECLARED_NAMES:
            state = agreed(partial(_of_version_2, wanted, engine.graph, checkpoint), names_rank=False)
        else:
            state = _of_current_version(wanted, checkpoint)
    engine.load_state(state)


def _of_current_version(wanted: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the state in a checkpoint whose tensors have the names of weights. Every rank calls it."""
    agreed(partial(_check_tensors, wanted, checkpoint), names_rank=False)
    # Without a comparable fingerprint, the checkpoint must have exactly the tensors of this model.
    comparable = checkpoint.manifest.has_comparable_fingerprint
    strict = StrictHandling.ASSUME_OK_UNEXPECTED if comparable else StrictHandling.RAISE_ALL
    try:
        return dist_checkpointing.load(wanted, str(checkpoint.folder), strict=strict)  # type: ignore[no-any-return]
    except CheckpointingException as error:  # of megatron-core, which compares names
        raise other_tensors(checkpoint, first_sentence(error)) from error
    except CheckpointException as error:  # of torch, from any rank: a tensor cannot be read
        cause, *_ = [*(cause for cause, _ in error.failures.values()), error]
        what = first_sentence(cause)
        if isinstance(cause, DAMAGE) or any(word in str(cause) for word in FROM_TORCH_READER):
            raise damaged_contents(checkpoint, what) from error
        raise CheckpointError(unusable(checkpoint.folder, f"cannot be loaded: {what}", ONCE_MORE)) from error


def _check_tensors(wanted: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Raise CheckpointError unless a checkpoint has the tensors of a state, in their sizes."""
    try:
        json.loads((checkpoint.folder / "metadata.json").read_text(encoding="utf-8"))
    except ValueError:
        raise damaged_contents(checkpoint, "metadata.json is not JSON") from None
    found = read_metadata(checkpoint.folder).state_dict_metadata
    for shard in _shards(wanted):
        stored = found.get(shard.key)
        if not isinstance(stored, TensorStorageMetadata):
            raise other_tensors(checkpoint, f"it has no tensor {shard.key!r}")
        sizes = tuple(shard.global_shape)
        if tuple(stored.size) != sizes and not shard.allow_shape_mismatch:
            raise other_tensors(
                checkpoint, f"its {shard.key} has sizes {list(stored.size)}, that of this model {list(sizes)}"
            )


def _shards(state: dict[str, Any]) -> Iterator[ShardedTensor]:
    """Yield the shards of a state that is to be loaded, those that factories would make included."""
    for entry in nested_values(state):
        if isinstance(entry, ShardedTensorFactory):
            empty = torch.empty(entry.data.shape, device="meta", dtype=entry.data.dtype)
            yield from (x for x in replace(entry, data=empty).build().values() if isinstance(x, ShardedTensor))
        elif isinstance(entry, ShardedTensor):
            yield entry


def _of_version_2(wanted: dict[str, Any], graph: Graph, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the state in a checkpoint of version 1 or 2, whose tensors have the names of parameters of modules.

    Raise CheckpointError if a tensor is missing. Without a comparable fingerprint, none may be unknown either.
    """
    folder = checkpoint.folder
    tensors = tensor_views(folder)
    kinds = [kind for kind in (MODEL, *MOMENTS, AVERAGE) if kind in wanted]
    others = tuple(f"{kind}." for kind in (*MOMENTS, AVERAGE))
    plain = {name: view for name, view in tensors.items() if not name.startswith(others)}
    if not checkpoint.manifest.has_comparable_fingerprint and (unknown := unknown_tensors(graph, plain)):
        raise other_tensors(checkpoint, f"its tensor {unknown[0]!r} is none of this model's")
    state: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(folder))
    try:
        for kind in kinds:
            own, prefix = (plain, "") if kind == MODEL else (of_kind(tensors, kind), f"{kind}.")
            state[kind] = dict(read_shards(wanted[kind], own | weights_of(graph, own), prefix))
    except OtherTensorsError as error:
        raise other_tensors(checkpoint, str(error)) from None
    return state


def _latest_on_ranks(run: Path, *, fingerprint: str, damaged: Mapping[str, str]) -> Checkpoint | None:
    """Return what rank 0 finds with `latest`, on all ranks."""

    def choose() -> Checkpoint | None:
        return None if dist.get_rank() else latest(run, fingerprint=fingerprint, damaged=damaged)

    found = [agreed(choose, names_rank=False)]
    dist.broadcast_object_list(found)
    return found[0]


def _changed_on_ranks(checkpoint: Checkpoint) -> list[str]:
    """Return the changed files of a checkpoint, of which each rank reads some."""
    share = slice(dist.get_rank(), None, dist.get_world_size())
    changed = agreed(partial(changed_files, checkpoint, share))
    return [name for part in gathered(changed) for name in part]
